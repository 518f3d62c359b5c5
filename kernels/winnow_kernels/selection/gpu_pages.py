"""From page scores to slots on a GPU: what the page-wise policies share (``winnow_kernels.selection.pages``).

One program selects for one row and head. The scores of all its pages stay in registers while their threshold is found,
the selected pages are compacted into a list in memory (4 bytes each, read again from the cache), and the list is
expanded to the slots of its tokens.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.kernel_arguments import Rows, Selected
from winnow_kernels.selection.gpu_threshold import LOWEST, ordered, threshold

MAX_PAGES: Final = 16384
"""Pages of the longest context: what the registers of a program hold."""

_PAGES_COMPACTED: Final = tl.constexpr(4096)
_TOKENS_AT_ONCE: Final = tl.constexpr(1024)
_PAGES_COMPARED: Final = tl.constexpr(64)


class PageBuffers(NamedTuple):
    """Scratch of the page-wise selectors, the same in all layers: 8 bytes for each row, head and page.

    Attributes:
        scores: float32 [rows, heads, pages].
        lists: int32 [rows, heads, pages]; the selected pages.
        width: pages of a row and head.
    """

    scores: Tensor
    lists: Tensor
    width: int

    @classmethod
    def empty(cls, rows: int, heads: int, pages: int, device: torch.device) -> PageBuffers:
        """Return buffers for contexts of ``pages`` pages.

        Raises:
            ValueError: these are more than ``MAX_PAGES``.
        """
        if pages > MAX_PAGES:
            raise ValueError(f"pages: must be at most {MAX_PAGES}; they are {pages}")
        scores = torch.zeros(rows, heads, pages, dtype=torch.float32, device=device)
        return cls(scores, torch.zeros_like(scores, dtype=torch.int32), pages)


def warps_of(pages: int) -> int:
    """Return how many warps a program needs that holds the scores of ``pages`` pages; a power of two."""
    return min(16, max(4, triton.next_power_of_2(pages) // 1024))


@triton.jit  # type: ignore[untyped-decorator]
def page_counts(length: tl.tensor, budget: tl.tensor, page_size: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return how many pages, and how many tokens, a context of ``length`` attends to with ``budget`` pages."""
    newest = (length - 1) // page_size
    kept = tl.minimum(budget, newest + 1)
    return kept, length - newest * page_size + (kept - 1) * page_size


@triton.jit  # type: ignore[untyped-decorator]
def select_pages(
    rows: Rows,
    row: tl.tensor,
    buffers: PageBuffers,
    selected: Selected,
    owner: tl.tensor,
    length: tl.tensor,
    kept: tl.tensor,
    recent: tl.tensor,
    sinks: tl.tensor,
    is_ordered: tl.tensor,
    copies: tl.tensor,
    pages: tl.constexpr,
) -> None:
    """Write the slots of the tokens in one head's pages: from the newest back, those of sinks, those that score most.

    The newest page is read from its newest token back, the others from their first on. Of equal scores the earlier
    page's comes first. Every thread of the program has to come here.

    Args:
        rows: of the batch.
        row: whose context it is.
        buffers: with the scores of pages; those that are always kept are not read. Lists are this program's scratch.
        selected: gets the result.
        owner: number of the row, or of the row and KV head, in buffers and result.
        length: tokens in the context.
        kept: pages to select, at least 1 and no more than the context has.
        recent: newest pages that are always kept, at least 1.
        sinks: tokens at the context's beginning whose pages are always kept, too; these and the recent ones are no more
            than ``kept`` where the context has as many.
        is_ordered: whether the others come by descending score; if not, in the context's order.
        copies: how many heads of an owner get the result.
        pages: a power of two, no less than the pages of the context.
    """
    scores_ptr = buffers.scores + owner * buffers.width
    list_ptr = buffers.lists + owner * buffers.width
    own_table_ptr = rows.page_table + row * rows.table_stride
    own_slots_ptr = selected.slots + owner * copies * selected.width
    newest = (length - 1) // rows.page_size
    recent = tl.minimum(recent, kept)
    first = tl.minimum(tl.cdiv(sinks, rows.page_size), kept - recent)
    always = recent + first
    end = newest + 1 - recent
    all_keys = _keys(scores_ptr, tl.arange(0, pages), first, end)
    least = threshold(all_keys, tl.full([pages], 1, tl.int32), tl.maximum(kept - always, 1))
    equal_room = kept - always - tl.sum((all_keys > least).to(tl.int32), axis=0)
    listed = always
    at_once: tl.constexpr = min(pages, _PAGES_COMPACTED)
    for begin in range(0, tl.where(kept > always, end, 0), at_once):
        page = begin + tl.arange(0, at_once)
        keys = _keys(scores_ptr, page, first, end)
        is_equal = (page >= first) & (page < end) & (keys == least)
        is_first = is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= equal_room)
        is_chosen = (keys > least) | is_first
        rank = tl.cumsum(is_chosen.to(tl.int32), axis=0)
        tl.store(list_ptr + listed + rank - 1, page, mask=is_chosen)
        listed += tl.sum(is_chosen.to(tl.int32), axis=0)
        equal_room -= tl.sum(is_first.to(tl.int32), axis=0)
    # What was stored is read back by other threads.
    tl.debug_barrier()
    in_newest = length - newest * rows.page_size
    expanded: tl.constexpr = _TOKENS_AT_ONCE // rows.page_size
    within = tl.arange(0, rows.page_size)
    for begin in range(0, kept, expanded):
        place = begin + tl.arange(0, expanded)
        is_kept = place < kept
        other = tl.load(list_ptr + place, mask=is_kept & (place >= always), other=0)
        page = tl.where(place < recent, newest - place, tl.where(place < always, place - recent, other))
        if is_ordered:
            place = _places_by_score(scores_ptr, list_ptr, place, page, kept, always)
        first_slot = tl.load(own_table_ptr + page, mask=is_kept, other=0) * rows.page_size
        is_newest = (place == 0)[:, None]
        behind = in_newest + (place[:, None] - 1) * rows.page_size + within
        target = tl.where(is_newest, in_newest - 1 - within, behind)
        is_token = is_kept[:, None] & (~is_newest | (within < in_newest))
        for copy in range(copies):
            tl.store(own_slots_ptr + copy * selected.width + target, first_slot[:, None] + within, mask=is_token)


@triton.jit  # type: ignore[untyped-decorator]
def _keys(scores_ptr: tl.tensor, page: tl.tensor, first: tl.tensor, end: tl.tensor) -> tl.tensor:
    """Return the keys of pages; ``LOWEST`` of what is no candidate: those from ``first`` to before ``end`` are."""
    is_candidate = (page >= first) & (page < end)
    return tl.where(is_candidate, ordered(tl.load(scores_ptr + page, mask=is_candidate, other=0.0)), LOWEST)


@triton.jit  # type: ignore[untyped-decorator]
def _places_by_score(
    scores_ptr: tl.tensor, list_ptr: tl.tensor, place: tl.tensor, page: tl.tensor, kept: tl.tensor, always: tl.tensor
) -> tl.tensor:
    """Return where each of the pages at ``place`` in the list comes if the list, from ``always`` on, is sorted.

    A page's place is how many precede it: that takes kept² comparisons, for a few hundred pages less than a sort.
    """
    is_listed = (place >= always) & (place < kept)
    key = ordered(tl.load(scores_ptr + page, mask=is_listed, other=0.0))
    preceding = tl.zeros_like(place)
    for begin in range(always, kept, _PAGES_COMPARED):
        other_place = begin + tl.arange(0, _PAGES_COMPARED)
        is_other = other_place < kept
        other_page = tl.load(list_ptr + other_place, mask=is_other, other=0)
        other = tl.where(is_other, ordered(tl.load(scores_ptr + other_page, mask=is_other, other=0.0)), LOWEST)
        precedes = (other[None, :] > key[:, None]) | (
            (other[None, :] == key[:, None]) & (other_place[None, :] < place[:, None])
        )
        preceding += tl.sum(precedes.to(tl.int32), axis=1)
    return tl.where(is_listed, always + preceding, place)
