"""``release``: a request gives back the KV slots of its prompt, but for what it will read again.

Before its first sparse step, what it keeps is moved to the first slots that are its own (``compact``). The rest of the
whole pages of its prompt is given back as soon as no forward pass under way can read it. Positions stay: its row of
SGLang's table says where each token lies, and those that are gone lie in SGLang's padding page, which is never read.

Slots of the prefix that a request shares belong to the tree, which keeps them. When a request ends or is retracted,
SGLang frees by its row; a row with such gaps is freed here, and SGLang is told that it ends with its first page.
After a retraction the prompt is prefilled anew, and given back anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.plugins.hook_registry import HookType
from torch import Tensor

from sglang_winnow.hooks import Hook
from sglang_winnow.metrics import METRICS, RELEASED_TOKENS, UNCACHED_TOKENS
from sglang_winnow.request_state import Released, RequestState
from sglang_winnow.sglang_versions.prefix_cache import shared_length
from sglang_winnow.sglang_versions.requests import allocated_length, committed_length, end_row, slot_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache


def is_due(state: RequestState, layers: Sequence[object]) -> bool:
    """Return whether a request that decodes has decided in all ``layers`` what it keeps for good, and keeps it all."""
    return state.releases and state.released is None and state.kept is not None and len(state.kept.kept) == len(layers)


def release(state: RequestState, row: Tensor, room: int, page_size: int, move: Callable[[Tensor, int], None]) -> None:
    """Move what a request keeps of its prompt, and take the rest of the prompt out of its row.

    On a GPU all of it is in the stream of the forward passes. SGLang has the stream in which slots are freed, and given
    to others, wait for what a pass does with its table before its CUDA graph is replayed, or for all of the pass.

    Args:
        state: of a request that ``is_due``.
        row: int32 [positions]; its row of SGLang's table, changed in place.
        room: how many slots it needs for what it keeps.
        page_size: tokens in a page.
        move: moves that to ``room`` slots of the prompt, int64 [tokens], from a position on.
    """
    begin = state.shared
    gone = begin + -(-room // page_size) * page_size
    end = state.prompt_length // page_size * page_size
    if gone >= end:
        state.released = Released(0)
        return
    prompt = row[: state.prompt_length].long()
    move(prompt, begin)
    state.released = Released(end - gone, prompt[gone:end])
    row[gone:end] = 0
    METRICS.add(RELEASED_TOKENS, end - gone)


def free_after_step(scheduler: Scheduler, batch: ScheduleBatch, *_: object, **__: object) -> None:
    """Free what the requests of a batch have given back before the step whose result is processed now."""
    for req in batch.reqs:
        if _free(_released(req), scheduler.token_to_kv_pool_allocator):
            # SGLang looks for room again only when a request has ended.
            scheduler.running_batch.batch_is_full = False


def free_row(req: Req, tree_cache: BasePrefixCache, *_: object, **__: object) -> None:
    """Free all that a request still has which has given back a part of its prompt, but for what it shares."""
    released = _released(req)
    if released is None or released.tokens == 0:
        return
    allocator = tree_cache.token_to_kv_pool_allocator
    _free(released, allocator)
    # A page is left to SGLang, which holds a row without any for one that was freed.
    begin, end = shared_length(req) + allocator.page_size, committed_length(req)
    row = tree_cache.req_to_token_pool.req_to_token[slot_of(req), begin : allocated_length(req)]
    allocator.free(row[row >= allocator.page_size].long())
    METRICS.add(UNCACHED_TOKENS, max(0, end - req.winnow_state.prompt_length))
    end_row(req, begin)
    req.winnow_state.kept.moved = None


def _free(released: Released | None, allocator: BaseTokenToKVPoolAllocator) -> bool:
    """Return whether there was something to free."""
    if released is None or released.slots is None:
        return False
    if released.slots.is_cuda:
        # They were found in the stream of the forward passes, to which their memory returns.
        released.slots.record_stream(torch.cuda.current_stream(released.slots.device))
    allocator.free(released.slots)
    released.slots = None
    return True


def _released(req: Req) -> Released | None:
    state: RequestState | None = getattr(req, "winnow_state", None)
    return None if state is None else state.released


HOOKS: Final[tuple[Any, ...]] = (
    Hook("sglang.srt.mem_cache.common.release_kv_cache", free_row, HookType.BEFORE),
    Hook("sglang.srt.managers.scheduler.Scheduler.process_batch_result", free_after_step, HookType.BEFORE),
)
