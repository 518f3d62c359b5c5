"""Exact answers from sparse drafts: SGLang's speculative algorithm ``WINNOW``, without a draft model.

A round of a batch has as many decode passes as its longest draft, and then one pass that checks:

- In decode passes every row takes part. A row that is not verified gets its next tokens there, one in each, as on any
  other server, and so does one that is, where its policy attends to everything or a draft would not pay. Any other that
  is verified drafts with its own sparse policy.
- The last pass attends densely, from the newest accepted token and the drafts behind it. It writes their keys and
  values over those of the drafts: what is committed is dense attention's, the newest accepted token's too.

Where all rows are verified, a round is one step of the scheduler. Then rows that do not draft and ask for more than
tokens take part in the first pass alone. Where all draft, the first pass of the next round is launched right behind the
last one (``draft_ahead``).

Where only some rows are verified, each decode pass is a step, and what checks is one more (``open_drafts``): rows that
are dense decode a token there, too. Verified rows get no token in the other steps. Beside a row that needs passes of
its own, because its policy is sparse or it asks for more than tokens, the check follows in the step of the last draft.

Behind each of these tokens the last pass draws the next one, as dense decoding would, and a draft stands if it is the
one that was drawn. So answers have the distribution of dense decoding, whatever is drafted. Drafts are the tokens that
the policy finds most probable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec
from torch import Tensor

from sglang_winnow.hooks import around
from sglang_winnow.sglang_versions.arguments import decide
from sglang_winnow.sglang_versions.releases import DRAFT_POOL_OF_WORKER, runs
from sglang_winnow.verification_worker import WIDTH, VerificationWorker
from winnow_kernels.contract.verification import ALGORITHM, MAX_CHECKED_TOKENS

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


class NextTokensRelay(FutureMap):
    """Under overlap, hands the newest tokens on by request slot, without a GPU's streams where there are none."""

    def _resolve_spec_extras(self, batch: ScheduleBatch) -> None:
        if self.output_tokens_buf.is_cuda:
            super()._resolve_spec_extras(batch)
        elif (tokens := batch.spec_info) is not None:
            tokens.bonus_tokens = self.output_tokens_buf[tokens.future_indices]


class VerificationAlgorithm(CustomSpecAlgo):
    """What SGLang asks of an algorithm, and its base class for those from outside does not have.

    Attributes:
        checked_width: tokens a row of the checks whose CUDA graphs are being captured; None while others are.
    """

    checked_width: int | None = None

    def is_speculative(self) -> bool:
        # Where graphs are captured, and nowhere else, this tells a decode step of one token a row from a check.
        return self.checked_width is not None

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return False

    def create_future_map(self, *arguments: Any, **options: Any) -> FutureMap:
        device, *others = arguments
        return NextTokensRelay(device, self, *others, **options)

    def handle_server_args(self, server_args: ServerArgs) -> None:
        decide(server_args, speculative_num_draft_tokens=WIDTH)


def register_algorithm() -> None:
    """Register ``--speculative-algorithm WINNOW``; once is enough."""
    if get_spec(ALGORITHM) is None:
        SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=VerificationAlgorithm)(
            lambda _arguments: VerificationWorker
        )


def _no_draft_pool(get_draft_kv_pool: Callable[..., Any], *, draft_worker: object, **others: Any) -> Any:
    # SGLang expects a draft model behind every algorithm but its own NGRAM.
    if isinstance(draft_worker, VerificationWorker):
        return None
    return get_draft_kv_pool(draft_worker=draft_worker, **others)


def _last_slots(find: Callable[..., Tensor], table: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
    # SGLang launches Triton for every backend that it does not know.
    if table.is_cuda:
        return find(table, slots, lengths)
    from sglang.srt.mem_cache.allocation import get_last_loc_torch  # noqa: PLC0415

    return get_last_loc_torch(table, slots, lengths)


def _write_slots(
    write: Callable[..., None],
    slots: Tensor,
    table: Tensor,
    starts: Tensor,
    ends: Tensor,
    new: Tensor,
    count: int,
) -> None:
    if table.is_cuda:
        write(slots, table, starts, ends, new, count)
        return
    spans = zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True)
    written = 0
    for slot, start, end in spans:
        table[slot, start:end] = new[written : written + end - start]
        written += end - start


def _no_copies(prepare: Callable[..., None], pool: MHATokenToKVPool) -> None:
    # What stands already lies where it belongs; SGLang prepares for others, and launches Triton.
    if torch.device(pool.device).type == "cpu":
        pool._kv_copy_config = None  # noqa: SLF001
    else:
        prepare(pool)


def _sizes_of_graphs(
    sizes_of: Callable[..., tuple[list[int], list[int]]], runner: ModelRunner, width: int, **others: Any
) -> tuple[list[int], list[int]]:
    captured, compiled = sizes_of(runner, width, **others)
    if getattr(runner.spec_algorithm, "checked_width", None) is None:
        return captured, compiled
    return [size for size in captured if size * width <= MAX_CHECKED_TOKENS], compiled


_ALLOCATION: Final = "sglang.srt.mem_cache.allocation"
HOOKS: Final = around(
    ({} if runs(DRAFT_POOL_OF_WORKER) else {"sglang.srt.mem_cache.kv_cache_builder.get_draft_kv_pool": _no_draft_pool})
    | {
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.get_batch_sizes_to_capture": _sizes_of_graphs,
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup": _no_copies,
        f"{_ALLOCATION}.get_last_loc": _last_slots,
        f"{_ALLOCATION}.assign_req_to_token_pool_func": _write_slots,
    }
)
