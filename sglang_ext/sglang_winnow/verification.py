"""Exact answers from sparse drafts: SGLang's speculative algorithm ``WINNOW``, without a draft model.

A round of a batch has as many decode passes as its longest draft, and then one pass that checks:

- In the first, every row takes part. A row that is not verified gets its next token there, as on any other server, and
  so does one that is, where its policy attends to everything or a draft would not pay. Any other that is verified
  drafts with its own sparse policy, as in the passes that follow.
- The last pass attends densely, from the newest accepted token and the drafts behind it. It writes their keys and
  values over those of the drafts: what is committed is dense attention's, the newest accepted token's too.

Behind each of these tokens the last pass draws the next one, as dense decoding would, and a draft stands if it is the
one that was drawn. So answers have the distribution of dense decoding, whatever is drafted. Drafts are the tokens that
the policy finds most probable.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec
from torch import Tensor

from sglang_winnow.hooks import around
from sglang_winnow.reporting import note_rows
from sglang_winnow.request_policy import drafts
from winnow_kernels.contract.verification import ALGORITHM, MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.server_args import ServerArgs

WIDTH: Final = MAX_DRAFT_TOKENS + 1
"""Tokens that a round yields for a row, at most: all drafts, and the one that follows them."""


class NextTokens(SpecInput):
    """What a round hands to the next: the newest token of each row, whose key and value are not written yet.

    Attributes:
        bonus_tokens: int64 [rows].
        future_indices: int64 [rows], request slots; set by SGLang under overlap.
    """

    topk_p = topk_index = hidden_states = None

    def __init__(self, bonus_tokens: Tensor) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.bonus_tokens = bonus_tokens
        self.future_indices: Tensor | None = None

    def filter_batch(self, new_indices: Tensor, **_: object) -> None:
        self.bonus_tokens = self.bonus_tokens[new_indices]
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]

    def merge_batch(self, other: NextTokens) -> None:
        self.bonus_tokens = torch.cat((self.bonus_tokens, other.bonus_tokens))
        if self.future_indices is not None and other.future_indices is not None:
            self.future_indices = torch.cat((self.future_indices, other.future_indices))


class NextTokensRelay(FutureMap):
    """Under overlap, hands the newest tokens on by request slot. SGLang's own needs the streams of a GPU."""

    def _resolve_spec_extras(self, batch: ScheduleBatch) -> None:
        if (tokens := batch.spec_info) is not None:
            tokens.bonus_tokens = self.output_tokens_buf[tokens.future_indices]


class VerificationAlgorithm(CustomSpecAlgo):
    """What SGLang asks of an algorithm, and its base class for those from outside does not have."""

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
        server_args.speculative_num_draft_tokens = WIDTH


class VerificationWorker(BaseSpecWorker):
    """Drafts and checks with the one model that there is."""

    def __init__(self, *, target_worker: TpModelWorker, **_: Any) -> None:
        self._target_worker = target_worker

    @property
    def draft_worker(self) -> None:
        return None

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Callable[[Tensor], None] | None = None
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_decode():
            result = self._round(batch)
        else:
            result = self.target_worker.forward_batch_generation(batch)
            result.new_seq_lens = batch.seq_lens.clone()
            result.accept_lens = torch.ones_like(batch.seq_lens, dtype=torch.int32)
            result.next_draft_input = NextTokens(result.next_token_ids.to(torch.int64))
        result.speculative_num_draft_tokens = WIDTH
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    def _round(self, batch: ScheduleBatch) -> GenerationBatchResult:
        bonus, lengths = batch.spec_info.bonus_tokens, batch.seq_lens
        limits = self._limits(batch)
        tokens = torch.zeros(len(batch.reqs), WIDTH, dtype=torch.int64, device=lengths.device)
        accepted = torch.ones_like(lengths)
        first = _part(batch, list(range(len(batch.reqs))))
        result = self._decode(first, bonus, lengths)
        tokens[:, 0] = result.next_token_ids
        if verified := [row for row, limit in enumerate(limits) if limit]:
            drafted = tokens.clone()
            drafted[verified, 0] = result.logits_output.next_token_logits[verified].argmax(-1)
            for step in range(1, max(limits)):
                rows = [row for row in verified if limits[row] > step]
                part = _part(batch, rows)
                logits = self._decode(part, drafted[rows, step - 1], lengths[rows] + step, sample=False).logits_output
                drafted[rows, step] = logits.next_token_logits.argmax(-1)
            self._verify(batch, verified, limits, bonus, drafted, tokens, accepted)
        # SGLang looks for as many of these as tokens were accepted; who is verified does not ask for them.
        if (logprobs := result.logits_output.next_token_logprobs) is not None:
            result.logits_output.next_token_logprobs = logprobs[:, None]
        if batch.return_hidden_states and (states := result.logits_output.hidden_states) is not None:
            result.logits_output.hidden_states = states.repeat_interleave(WIDTH, 0)
        result.next_token_ids = tokens.flatten()
        result.accept_lens = accepted.to(torch.int32)
        result.new_seq_lens = lengths + accepted
        result.next_draft_input = NextTokens(tokens[torch.arange(len(tokens)), accepted - 1])
        note_rows(result, self.target_worker, batch)
        return result

    def _limits(self, batch: ScheduleBatch) -> list[int]:
        """Return how many tokens each row drafts in this round; note who rests."""
        page_size = self.target_worker.model_runner.page_size
        limits = []
        for req, length in zip(batch.reqs, batch.seq_lens.tolist(), strict=True):
            state, limit = req.winnow_state, 0
            state.rests = False
            if drafts(state, length + 1, page_size):
                limit = max(0, state.draft_length.next(req.sampling_params.max_new_tokens - len(req.output_ids)))
                state.rests = limit == 0
            limits.append(limit)
        return limits

    def _decode(
        self, part: ScheduleBatch, tokens: Tensor, cached: Tensor, *, sample: bool = True
    ) -> GenerationBatchResult:
        table = part.req_to_token_pool.req_to_token
        part.forward_mode = ForwardMode.DECODE
        part.input_ids = tokens
        part.out_cache_loc = table[part.req_pool_indices, cached].to(torch.int64)
        part.seq_lens = cached + 1
        part.seq_lens_cpu = part.seq_lens.cpu()
        part.seq_lens_sum = None
        part.spec_info = None
        return self.target_worker.forward_batch_generation(part, is_verify=not sample)

    def _verify(
        self,
        batch: ScheduleBatch,
        rows: list[int],
        limits: list[int],
        bonus: Tensor,
        drafted: Tensor,
        tokens: Tensor,
        accepted: Tensor,
    ) -> None:
        """Check what ``rows`` have drafted; fill in their ``tokens`` and how many of these are ``accepted``."""
        part = _part(batch, rows)
        cached = part.seq_lens.tolist()
        new = [limits[row] + 1 for row in rows]
        table = part.req_to_token_pool.req_to_token
        slots = part.req_pool_indices.tolist()
        spans = list(zip(rows, slots, cached, new, strict=True))
        part.forward_mode = ForwardMode.TARGET_VERIFY
        part.input_ids = torch.cat([torch.cat((bonus[row : row + 1], drafted[row, : n - 1])) for row, _, _, n in spans])
        part.out_cache_loc = torch.cat([table[slot, start : start + n] for _, slot, start, n in spans]).to(torch.int64)
        part.prefix_lens, part.extend_lens = cached, new
        part.seq_lens = part.seq_lens + torch.tensor(new, device=part.seq_lens.device)
        part.seq_lens_cpu, part.seq_lens_sum = part.seq_lens.cpu(), None
        part.spec_info = VerifiedTokens(torch.cat([torch.arange(start, start + n) for _, _, start, n in spans]), new)
        checked = self.target_worker.forward_batch_generation(part, is_verify=True).logits_output
        runner = self.target_worker.model_runner
        of_tokens = _of_tokens(batch.sampling_info, rows, new)
        of_tokens.apply_logits_bias(checked.next_token_logits)
        drawn = runner.sampler(checked, of_tokens, False, [], [], part.spec_info.positions).to(torch.int64).split(new)
        for row, own in zip(rows, drawn, strict=True):
            standing = standing_drafts(drafted[row, : limits[row]], own)
            batch.reqs[row].winnow_state.draft_length.note(limits[row], standing)
            accepted[row] = 1 + standing
            tokens[row, : len(own)] = own
        runner.attn_backend.accept(accepted[rows])


class VerifiedTokens(SpecInput):
    """Where the tokens of a pass that checks lie: int64 [tokens], and how many each row has."""

    def __init__(self, positions: Tensor, lengths: list[int]) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.positions = positions
        self.lengths = lengths


def standing_drafts(drafted: Tensor, drawn: Tensor) -> int:
    """Return how many of the tokens that were ``drafted``, int64 [n], are those that were ``drawn``, int64 [n + 1].

    From the first on that is not, others were drawn behind other tokens than the answer has.
    """
    return int((drafted == drawn[:-1]).long().cumprod(0).sum())


def _of_tokens(info: SamplingBatchInfo, rows: list[int], counts: list[int]) -> SamplingBatchInfo:
    """Return the sampling parameters of ``rows`` of a batch, each once for all ``counts`` of its tokens."""
    part = copy(info)
    index = torch.tensor(rows, device=info.temperatures.device).repeat_interleave(
        torch.tensor(counts, device=info.temperatures.device)
    )
    for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias"):
        if (values := getattr(info, name)) is not None:
            setattr(part, name, values[index])
    # Those who ask for any of these are not verified.
    part.penalizer_orchestrator = part.acc_additive_penalties = part.acc_scaling_penalties = None
    part.grammars = part.vocab_mask = part.return_sampling_masks = None
    part.has_custom_logit_processor = False
    return part


def _part(batch: ScheduleBatch, rows: list[int]) -> ScheduleBatch:
    """Return some rows of a batch, to be planned and run by themselves; if not all, only for their logits."""
    part = copy(batch)
    part.return_logprob = part.return_logprob and len(rows) == len(batch.reqs)
    if len(rows) == len(batch.reqs):
        return part
    index = torch.tensor(rows, device=batch.seq_lens.device)
    part.reqs = [batch.reqs[row] for row in rows]
    for name in ("req_pool_indices", "seq_lens", "orig_seq_lens"):
        setattr(part, name, getattr(batch, name)[index])
    for name in ("req_pool_indices_cpu", "seq_lens_cpu"):
        setattr(part, name, getattr(batch, name)[torch.tensor(rows)])
    part.sampling_info = copy(batch.sampling_info)
    return part


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


_ALLOCATION: Final = "sglang.srt.mem_cache.allocation"
HOOKS: Final = around(
    {
        "sglang.srt.mem_cache.kv_cache_builder.get_draft_kv_pool": _no_draft_pool,
        f"{_ALLOCATION}.get_last_loc": _last_slots,
        f"{_ALLOCATION}.assign_req_to_token_pool_func": _write_slots,
    }
)
