"""``verified_pages`` on a GPU (``reference``): pages chosen in the passes that check, out of their own attention.

The attention of a check leaves each page's mass for every new token and query head: 4 bytes for each and page, and 4
for each and tile, that is 1 % of the bytes of keys and values for five tokens, a group of 4 and bf16 keys of 128. A
launch in each layer adds up the masses of a KV head, once log-sum-exps are known (``weigh``), and one for several
layers, which together fill the device, chooses (``keep``). What is chosen waits in memory for the drafts, of which each
layer has one launch, SnapKV's.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.attend.early_termination import TILE
from winnow_kernels.attend.gpu_check import PageSums
from winnow_kernels.batch import NO_MASS, DecodeBatch
from winnow_kernels.kernel_arguments import Pointer, Rows
from winnow_kernels.selection.gpu_pages import warps_of
from winnow_kernels.selection.gpu_threshold import LOWEST, ordered, threshold

_PAGES_WEIGHED: Final = 128
_QUERIES_WEIGHED: Final = 32
_PAGES_COMPACTED: Final = tl.constexpr(1024)
_SINKS_AT_ONCE: Final = tl.constexpr(64)
_TILE: Final = tl.constexpr(TILE)
_NO_MASS: Final = tl.constexpr(NO_MASS)


class KeptPages(NamedTuple):
    """What the requests of a server draft from.

    Attributes:
        pages: int32 [capacity]; the pool in which each layer and KV head of a request has room for what it may keep.
        offsets: int64 [request slots, layers, KV heads]; where that begins.
        kept: int32 [request slots, layers, KV heads]; how many pages are kept there.
        since: int32 [request slots]; position from which on everything is attended to.
    """

    pages: Pointer
    offsets: Pointer
    kept: Pointer
    since: Pointer


class BudgetRows(NamedTuple):
    """What a batch's rows may keep.

    Attributes:
        recent: int32 [rows]; newest complete pages, at least 1; 0 for a row of another kind.
        most: int32 [rows]; pages that are kept for their masses.
        sinks: int32 [rows]; first tokens, whose pages are always kept.
    """

    recent: Pointer
    most: Pointer
    sinks: Pointer


def weigh(
    new_tokens: int,
    batch: DecodeBatch,
    budgets: BudgetRows,
    sums: PageSums,
    own_tokens: Tensor,
    totals: Tensor,
    masses: Tensor,
) -> None:
    """Add up what the queries of each KV head give to each page, after a layer's attention in a check.

    Args:
        new_tokens: of each row.
        batch: where the rows' contexts lie, the new tokens among them.
        budgets: of the rows.
        sums: the pages' masses, as attention has left them.
        own_tokens: int32 [rows]; how many of the new tokens, the first ones, attended.
        totals: float32 [tokens, query heads]; log-sum-exps to base 2.
        masses: float32 [rows, KV heads, pages], contiguous; what is written to.
    """
    rows, kv_heads, pages = masses.shape
    assert masses.is_contiguous()
    assert (rows, pages) == (batch.rows, batch.page_table.shape[1])
    group = totals.shape[1] // kv_heads
    _weigh_kernel[(triton.cdiv(pages, _PAGES_WEIGHED), kv_heads, rows)](
        budgets,
        Rows.of(batch),
        sums,
        own_tokens,
        totals,
        masses,
        pages,
        new_tokens=new_tokens,
        group=group,
        kv_heads=kv_heads,
        block=_PAGES_WEIGHED,
        queries_at_once=min(_QUERIES_WEIGHED, triton.next_power_of_2(new_tokens * group)),
        num_warps=4,
    )


def keep(
    first_layer: int,
    new_tokens: int,
    batch: DecodeBatch,
    budgets: BudgetRows,
    masses: Tensor,
    request_slots: Tensor,
    kept: KeptPages,
) -> None:
    """Choose the pages that the rows' next drafts attend to in some layers.

    Args:
        first_layer: number of the first of them.
        new_tokens: that are checked, of each row.
        batch: where the rows' contexts lie, the new tokens among them.
        budgets: of the rows.
        masses: float32 [layers, rows, KV heads, pages], contiguous; as ``weigh`` has left them.
        request_slots: int64 [rows].
        kept: what is written to.
    """
    of_launch, rows, kv_heads, pages = masses.shape
    assert masses.is_contiguous()
    assert (rows, pages) == (batch.rows, batch.page_table.shape[1])
    _keep_kernel[(kv_heads, rows, of_launch)](
        budgets,
        Rows.of(batch),
        masses,
        request_slots,
        kept,
        pages,
        first_layer,
        new_tokens=new_tokens,
        layers=kept.offsets.shape[1],
        kv_heads=kv_heads,
        block=triton.next_power_of_2(pages),
        num_warps=warps_of(pages),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _first_of_recent(rows: Rows, row: tl.tensor, new_tokens: tl.constexpr, recent: tl.tensor) -> tl.tensor:
    """Return the page from which on everything is attended to."""
    cached = tl.load(rows.lengths + row) - new_tokens
    return tl.maximum(cached // rows.page_size - recent, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _weigh_kernel(
    budgets: BudgetRows,
    rows: Rows,
    sums: PageSums,
    own_tokens_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    pages: tl.tensor,
    new_tokens: tl.constexpr,
    group: tl.constexpr,
    kv_heads: tl.constexpr,
    block: tl.constexpr,
    queries_at_once: tl.constexpr,
) -> None:
    """Grid: blocks of pages × KV heads × rows."""
    begin = tl.program_id(0) * block
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    recent = tl.load(budgets.recent + row)
    if recent == 0:
        return
    end = _first_of_recent(rows, row, new_tokens, recent)
    if begin >= end:
        return
    page = begin + tl.arange(0, block)
    pair = row * kv_heads + kv_head
    queries: tl.constexpr = new_tokens * group
    own_queries = tl.load(own_tokens_ptr + row) * group
    pages_of_tile: tl.constexpr = _TILE // rows.page_size
    tiles = tl.cdiv(sums.width, pages_of_tile)
    mass = tl.zeros([block], tl.float32)
    for first in tl.static_range(0, queries, queries_at_once):
        query = first + tl.arange(0, queries_at_once)
        of_head = (row * new_tokens + query // group) * (kv_heads * group) + kv_head * group + query % group
        total = tl.load(totals_ptr + of_head, mask=query < own_queries, other=0.0)
        is_own = (page < end)[:, None] & (query < own_queries)[None, :]
        own_sums = tl.load(
            sums.sums + (pair * sums.width + page)[:, None] * queries + query[None, :], mask=is_own, other=0.0
        )
        highest = tl.load(
            sums.highest + (pair * tiles + page // pages_of_tile)[:, None] * queries + query[None, :],
            mask=is_own,
            other=_NO_MASS,
        )
        mass += tl.sum(own_sums * tl.exp2(highest - total[None, :]), axis=1)
    tl.store(masses_ptr + pair * pages + page, mass, mask=page < end)


@triton.jit(do_not_specialize=["first_layer"])  # type: ignore[untyped-decorator]
def _keep_kernel(
    budgets: BudgetRows,
    rows: Rows,
    masses_ptr: tl.tensor,
    request_slots_ptr: tl.tensor,
    stored: KeptPages,
    pages: tl.tensor,
    first_layer: tl.tensor,
    new_tokens: tl.constexpr,
    layers: tl.constexpr,
    kv_heads: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write the pages of a row and KV head in a layer, in the context's order. Grid: KV heads × rows × layers."""
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    layer = first_layer + tl.program_id(2)
    recent = tl.load(budgets.recent + row)
    if recent == 0:
        return
    request_slot = tl.load(request_slots_ptr + row)
    end = _first_of_recent(rows, row, new_tokens, recent)
    sinks = tl.minimum(tl.cdiv(tl.load(budgets.sinks + row), rows.page_size), end)
    most = tl.minimum(tl.load(budgets.most + row), end - sinks)
    own = (request_slot * layers + layer) * kv_heads + kv_head
    tl.store(stored.kept + own, sinks + most)
    if (layer == 0) & (kv_head == 0):
        tl.store(stored.since + request_slot, end * rows.page_size)
    of_layer = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + row
    own_masses_ptr = masses_ptr + (of_layer * kv_heads + kv_head) * pages
    list_ptr = stored.pages + tl.load(stored.offsets + own)
    for begin in range(0, sinks, _SINKS_AT_ONCE):
        page = begin + tl.arange(0, _SINKS_AT_ONCE)
        tl.store(list_ptr + page, page, mask=page < sinks)
    keys = _keys(own_masses_ptr, tl.arange(0, block), sinks, end)
    least = threshold(keys, tl.full([block], 1, tl.int32), tl.maximum(most, 1))
    equal_room = most - tl.sum((keys > least).to(tl.int32), axis=0)
    at_once: tl.constexpr = min(block, _PAGES_COMPACTED)
    listed = sinks
    for begin in range(sinks, tl.where(most > 0, end, 0), at_once):
        page = begin + tl.arange(0, at_once)
        own_keys = _keys(own_masses_ptr, page, sinks, end)
        is_equal = (page < end) & (own_keys == least)
        is_first = is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= equal_room)
        is_chosen = (own_keys > least) | is_first
        equal_room -= tl.sum(is_first.to(tl.int32), axis=0)
        rank = tl.cumsum(is_chosen.to(tl.int32), axis=0)
        tl.store(list_ptr + listed + rank - 1, page, mask=is_chosen)
        listed += tl.sum(is_chosen.to(tl.int32), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _keys(masses_ptr: tl.tensor, page: tl.tensor, first: tl.tensor, end: tl.tensor) -> tl.tensor:
    """Return the keys of pages; ``LOWEST`` of those before ``first`` and from ``end`` on."""
    is_candidate = (page >= first) & (page < end)
    return tl.where(is_candidate, ordered(tl.load(masses_ptr + page, mask=is_candidate, other=0.0)), LOWEST)
