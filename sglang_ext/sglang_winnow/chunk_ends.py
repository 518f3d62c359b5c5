"""Chunks of a prompt that is prefilled sparsely end between blocks, so that its KV does not depend on the load."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow.hooks import Hook
from sglang_winnow.server_information import block_of
from sglang_winnow.sglang_versions.prefill import cached_length, compute_until, computed_range
from winnow_kernels.policies.quoka.parameters import QuokaPrefill

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

    from sglang_winnow.request_state import RequestState


def add_request(
    add_one_req: Callable[..., AddReqResult],
    adder: PrefillAdder,
    req: Req,
    has_chunked_req: bool,
    truncation_align_size: int | None,
) -> AddReqResult:
    """Add a request to a prefill batch; its first chunk ends between blocks."""
    if (block := prefill_block(req, adder.page_size)) is not None:
        truncation_align_size = math.lcm(block, truncation_align_size or 1)
    result = add_one_req(adder, req, has_chunked_req, truncation_align_size)
    if block is not None and adder.new_chunked_req is req:
        # SGLang goes on with one unfinished prompt only, and takes it that there is no room behind one.
        adder.rem_chunk_tokens = 0
        return adder.budget_state()
    return result


def add_request_without_cache(
    add_one_req_ignore_eos: Callable[..., AddReqResult], adder: PrefillAdder, req: Req
) -> AddReqResult:
    """Add a request to a prefill batch of a server without radix cache; its first chunk ends between blocks."""
    block, room = prefill_block(req, adder.page_size), adder.rem_chunk_tokens
    if block is None or room is None or len(req.full_untruncated_fill_ids) - cached_length(req) <= room:
        return add_one_req_ignore_eos(adder, req)
    adder.rem_chunk_tokens = _whole(room, block)
    result = add_one_req_ignore_eos(adder, req)
    if adder.new_chunked_req is not req:
        adder.rem_chunk_tokens = room
    return result


def add_next_chunk(add_chunked_req: Callable[..., Req | None], adder: PrefillAdder, req: Req) -> Req | None:
    """Add a request's next chunk to a prefill batch, ending between blocks; return it if there is more to come."""
    remaining = add_chunked_req(adder, req)
    block = prefill_block(req, adder.page_size)
    if remaining is None or block is None:
        return remaining
    start, end = computed_range(req)
    # The chunk must go on: SGLang too takes more than the room that it reckons with.
    whole = max(_whole(end, block), _whole(start, block) + block)
    total = len(req.full_untruncated_fill_ids)
    if whole != end:
        until = min(whole, total)
        compute_until(req, until)
        adder._update_prefill_budget(0, until - end, 0, req.retracted_stain)  # noqa: SLF001
    if whole >= total:
        return None
    # As in ``add_request``.
    adder.rem_chunk_tokens = 0
    return remaining


def prefill_block(req: Req, page_size: int) -> int | None:
    """Return the grid of a request's sparse prefill, in tokens; None if it is dense."""
    state: RequestState | None = getattr(req, "winnow_state", None)
    if state is None or not isinstance(state.policy.prefill, QuokaPrefill):
        return None
    return block_of(state.policy, page_size)


def _whole(length: int, step: int) -> int:
    return length // step * step


_ADDER: Final = "sglang.srt.managers.schedule_policy.PrefillAdder"
HOOKS: Final[tuple[Any, ...]] = (
    Hook(f"{_ADDER}.add_one_req", add_request, HookType.AROUND),
    Hook(f"{_ADDER}.add_one_req_ignore_eos", add_request_without_cache, HookType.AROUND),
    Hook(f"{_ADDER}.add_chunked_req", add_next_chunk, HookType.AROUND),
)
