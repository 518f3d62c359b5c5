"""The order in which tokens are read (``selection``): a counting sort of clusters and other tokens.

Only early termination and a cap that cuts need an order. The listed clusters of a row and KV head are dealt out by runs
of ``RUN`` consecutive ones, whichever slices they are in, so that no program has many more than another. The tokens in
no cluster are in blocks of ``KEPT_BLOCK``.

    1. step   of each cluster its place in its run; of each run its tokens by step; another program of the row and KV
              head finds the steps of the blocks, and their tokens by step
    2. place  to that is added what comes before the cluster of all other runs, and of the blocks; other programs find
              what comes before the blocks

A cluster costs 24 bytes, comparisons with ``RUN`` others and ``SHARE_STEPS`` steps, and
then a number for each run: 47 for the 3,000 clusters that 12 % of 128K tokens bring. A block costs 4 bytes for each
query head, comparisons with the steps and with all blocks: 64 for 1,024 tokens. All of it lies in the L2 cache. What
takes time are two launches, each with some loads that wait for each other and sums over a block.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.kernel_arguments import Heads, Vectors
from winnow_kernels.policies.tactic.gpu.contexts import (
    NOTHING,
    Row,
    is_idle,
    kept_positions,
    keys_at,
    needs_order,
    row_at,
    scaled,
    table_of,
    united,
)
from winnow_kernels.policies.tactic.gpu.state import (
    KEPT_BLOCK,
    RUN,
    SLICE,
    Attention,
    Contexts,
    Cuts,
    Kept,
    Listed,
    Ordered,
    Scored,
)
from winnow_kernels.policies.tactic.gpu.union import share_of, share_step
from winnow_kernels.policies.tactic.reference import SHARE_STEPS
from winnow_kernels.selection.gpu_slots import slots_at
from winnow_kernels.selection.gpu_threshold import count_of

SPLITS: Final = 16
"""Programs among which the listed clusters of a row and KV head are dealt out, and then the blocks of other tokens."""
STEP_PROGRAMS: Final = SPLITS + 1
"""Programs of a row and KV head in the first launch; the last has the tokens in no cluster."""
PLACE_PROGRAMS: Final = 2 * SPLITS
"""The same in the second launch; the second half has them."""

_SLICE = tl.constexpr(SLICE)
_RUN = tl.constexpr(RUN)
_STEPS = tl.constexpr(SHARE_STEPS)
_SPLITS = tl.constexpr(SPLITS)
_OF_BLOCK = tl.constexpr(KEPT_BLOCK)
# Blocks of tokens in no cluster that are looked at together.
_BLOCKS = tl.constexpr(64)
# Steps whose sums a run has at a time: of more, they find no room in registers.
_SUMMED = tl.constexpr(32)
# Clusters whose places are found at a time, and of how many runs they look at the sums.
_PLACED, _OTHERS = tl.constexpr(128), tl.constexpr(8)
# Listed clusters of which what a cap cuts is added up together.
_CUT = tl.constexpr(1024)
_TOKENS = tl.constexpr(64)


@triton.jit  # type: ignore[untyped-decorator]
def step_kernel(
    contexts: Contexts,
    heads: Heads,
    scored: Scored,
    in_no_cluster: Kept,
    cuts: Cuts,
    listed: Listed,
    order: Ordered,
    group_block: tl.constexpr,
) -> None:
    """Find the steps of the blocks, and put the listed clusters of each run in order.

    Grid: (``STEP_PROGRAMS``, KV heads, rows).
    """
    part, kv_head = tl.program_id(0), tl.program_id(1)
    row = row_at(contexts, tl.program_id(2))
    is_ordered = tl.load(contexts.asked.by_priority + row.number)
    of_kv_head = row.number.to(tl.int64) * heads.kv_heads + kv_head
    kept_placed_ptr = in_no_cluster.placed + of_kv_head * 2
    if is_idle(row):
        tl.store(order.placed + of_kv_head, 0)
        tl.store(kept_placed_ptr, 0)
        return
    totals_ptr = listed.totals + of_kv_head * (scored.clusters // _SLICE)
    totals, kept, taken, wanted = united(totals_ptr, row, scored.clusters)
    if part == _SPLITS:
        kept = tl.where((is_ordered != 0) & (taken >= 0), kept, 0)
        tl.store(kept_placed_ptr, kept)
        tl.store(kept_placed_ptr + 1, taken)
        head = tl.arange(0, group_block)
        is_head = head < heads.group
        of_heads = of_kv_head * heads.group + head
        total = tl.load(cuts.totals + of_heads, mask=is_head, other=0.0)
        _step_blocks(in_no_cluster, of_kv_head, of_heads, is_head, total, kept, heads.group)
        return
    counts = count_of(totals)
    placed = tl.where(needs_order(taken, wanted, is_ordered), tl.sum(counts, axis=0), 0)
    tl.store(order.placed + of_kv_head, placed)
    if part * _RUN >= placed:
        return
    slice_ends = tl.cumsum(counts, axis=0)
    lists = of_kv_head * scored.clusters
    here = tl.arange(0, _RUN)
    for begin in range(part * _RUN, placed, _SPLITS * _RUN):
        is_listed = begin + here < placed
        # Each slice has a list of its own. Those of a run lie in a few.
        at = here * 0
        slice_number = tl.sum((slice_ends <= begin).to(tl.int32), axis=0)
        start = tl.sum(tl.where(slice_ends <= begin, counts, 0), axis=0)
        while start < tl.minimum(begin + _RUN, placed):
            at = tl.where(begin + here >= start, slice_number * _SLICE + begin + here - start, at)
            start += count_of(tl.load(totals_ptr + slice_number))
            slice_number += 1
        needed = tl.load(listed.needed + lists + at, mask=is_listed, other=0)
        step = tl.load(listed.steps + lists + at, mask=is_listed, other=_STEPS - 1)
        # They are listed by number. What pads them brings no tokens.
        key = step * _RUN + here
        before = tl.sum(tl.where(key[:, None] < key[None, :], needed[:, None], 0), axis=0)
        tl.store(order.steps + lists + begin + here, at * _STEPS + step, mask=is_listed)
        tl.store(order.places + lists + at, before, mask=is_listed)
        for first in tl.static_range(0, _STEPS, _SUMMED):
            each = first + tl.arange(0, _SUMMED)
            sums = tl.sum(tl.where(step[:, None] <= each[None, :], needed[:, None], 0), axis=0)
            tl.store(order.sums + (lists + begin) // _RUN * _STEPS + each, sums)


@triton.jit  # type: ignore[untyped-decorator]
def _step_blocks(
    in_no_cluster: Kept,
    of_kv_head: tl.tensor,
    of_heads: tl.tensor,
    is_head: tl.tensor,
    total: tl.tensor,
    kept: tl.tensor,
    group: tl.constexpr,
) -> None:
    """Find the steps of the blocks of the first ``kept`` tokens in no cluster, and how many tokens are in each.

    Args:
        in_no_cluster: these tokens.
        of_kv_head: number of the KV head, through all rows.
        of_heads: int64 [heads]; those of its query heads.
        is_head: bool [heads].
        total: float64 [heads]; logarithm, base 2, of all mass.
        kept: scalar; 0 to do nothing but clear the sums.
        group: query heads.
    """
    here = tl.arange(0, _BLOCKS)
    weights_ptr = in_no_cluster.weights + of_heads[:, None] * in_no_cluster.blocks
    steps_ptr = in_no_cluster.steps + of_kv_head * in_no_cluster.blocks
    sums_ptr = in_no_cluster.sums + of_kv_head * _STEPS
    for first in tl.static_range(0, _STEPS, _SUMMED):
        each = first + tl.arange(0, _SUMMED)
        sums = tl.zeros((_SUMMED,), tl.int32)
        for begin in range(0, tl.cdiv(kept, _OF_BLOCK), _BLOCKS):
            block = begin + here
            tokens = tl.minimum(tl.maximum(kept - block * _OF_BLOCK, 0), _OF_BLOCK)
            is_weight = is_head[:, None] & (tokens > 0)[None, :]
            weights = tl.load(weights_ptr + block[None, :], mask=is_weight, other=NOTHING)
            shares = tl.exp2((weights.to(tl.float64) - total[:, None]).to(tl.float32))
            step = share_step(tl.sum(tl.where(is_weight, shares, 0.0), axis=0) / group)
            tl.store(steps_ptr + block, step, mask=tokens > 0)
            sums += tl.sum(tl.where(step[:, None] <= each[None, :], tokens[:, None], 0), axis=0)
        tl.store(sums_ptr + each, sums)


@triton.jit  # type: ignore[untyped-decorator]
def place_kernel(in_no_cluster: Kept, order: Ordered, clusters: tl.constexpr) -> None:
    """Find what comes before the clusters, of clusters and of all, and what comes before the blocks.

    Grid: (``PLACE_PROGRAMS``, KV heads, rows).
    """
    part = tl.program_id(0)
    of_kv_head = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    listed = tl.load(order.placed + of_kv_head)
    kept = tl.load(in_no_cluster.placed + of_kv_head * 2)
    kept_sums_ptr = in_no_cluster.sums + of_kv_head * _STEPS
    step_sums_ptr = order.sums + of_kv_head * (clusters // _RUN * _STEPS)
    if part >= _SPLITS:
        taken = tl.load(in_no_cluster.placed + of_kv_head * 2 + 1)
        kept_steps_ptr = in_no_cluster.steps + of_kv_head * in_no_cluster.blocks
        kept_targets_ptr = in_no_cluster.targets + of_kv_head * in_no_cluster.blocks
        for begin in range((part - _SPLITS) * _BLOCKS, tl.cdiv(kept, _OF_BLOCK), _SPLITS * _BLOCKS):
            block = begin + tl.arange(0, _BLOCKS)
            is_block = block * _OF_BLOCK < kept
            step = tl.load(kept_steps_ptr + block, mask=is_block, other=0)
            before = tl.load(kept_sums_ptr + step - 1, mask=is_block & (step > 0), other=0)
            for others in range(0, begin + _BLOCKS, _BLOCKS):
                other = others + tl.arange(0, _BLOCKS)
                other_step = tl.load(kept_steps_ptr + other, mask=other * _OF_BLOCK < kept, other=_STEPS)
                # Only the last block has fewer tokens, and it comes before no other of its step.
                precedes = (other_step[None, :] == step[:, None]) & (other[None, :] < block[:, None])
                before += tl.sum(precedes.to(tl.int32), axis=1) * _OF_BLOCK
            in_front = _tokens_through(step_sums_ptr, step - 1, is_block, listed)
            # The cap cuts the last of the clusters.
            tl.store(kept_targets_ptr + block, before + tl.minimum(in_front, tl.maximum(taken, 0)), mask=is_block)
        return
    steps_ptr = order.steps + of_kv_head * clusters
    places_ptr = order.places + of_kv_head * clusters
    targets_ptr = order.targets + of_kv_head * clusters
    for begin in range(part * _PLACED, listed, _SPLITS * _PLACED):
        placed = begin + tl.arange(0, _PLACED)
        packed = tl.load(steps_ptr + placed, mask=placed < listed, other=0)
        at, step = packed // _STEPS, packed % _STEPS
        place = tl.load(places_ptr + at, mask=placed < listed, other=0)
        run = placed // _RUN
        in_front = tl.zeros((_OTHERS, _PLACED), tl.int32)
        for others in range(0, tl.cdiv(listed, _RUN), _OTHERS):
            other = others + tl.arange(0, _OTHERS)
            # Of smaller numbers, those in the same step come first too.
            through_step = step[None, :] - (other[:, None] > run[None, :]).to(tl.int32)
            is_other = (other * _RUN < listed)[:, None] & (other[:, None] != run[None, :])
            in_front += tl.load(
                step_sums_ptr + other[:, None] * _STEPS + through_step, mask=is_other & (through_step >= 0), other=0
            )
        place += tl.sum(in_front, axis=0)
        tl.store(places_ptr + at, place, mask=placed < listed)
        of_blocks = tl.load(kept_sums_ptr + step, mask=(placed < listed) & (kept > 0), other=0)
        tl.store(targets_ptr + at, place + of_blocks, mask=placed < listed)


@triton.jit  # type: ignore[untyped-decorator]
def _tokens_through(step_sums_ptr: tl.tensor, step: tl.tensor, is_block: tl.tensor, listed: tl.tensor) -> tl.tensor:
    """Return how many tokens are taken of clusters in steps up to ``step``, int32 [blocks]; none before the first."""
    in_front = tl.zeros((_OTHERS, _BLOCKS), tl.int32)
    for runs in range(0, tl.cdiv(listed, _RUN), _OTHERS):
        run = runs + tl.arange(0, _OTHERS)
        is_sum = (run * _RUN < listed)[:, None] & (is_block & (step >= 0))[None, :]
        in_front += tl.load(step_sums_ptr + run[:, None] * _STEPS + step[None, :], mask=is_sum, other=0)
    return tl.sum(in_front, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def lost_kernel(
    attention: Attention,
    heads: Heads,
    contexts: Contexts,
    scored: Scored,
    cuts: Cuts,
    listed: Listed,
    order: Ordered,
) -> None:
    """State what share of a query head's mass a cap cuts off. Grid: (query heads, rows)."""
    head = tl.program_id(0)
    row = row_at(contexts, tl.program_id(1))
    if is_idle(row) | (row.cap == 0):
        return
    kv_head = head // heads.group
    of_kv_head = row.number.to(tl.int64) * heads.kv_heads + kv_head
    _totals, kept, taken, wanted = united(
        listed.totals + of_kv_head * (scored.clusters // _SLICE), row, scored.clusters
    )
    in_no_cluster = row.length - row.clustered
    if (taken < 0) | (kept + taken == in_no_cluster + wanted):
        return
    of_head = row.number.to(tl.int64) * (heads.kv_heads * heads.group) + head
    total = tl.load(cuts.totals + of_head)
    lost = tl.zeros([_TOKENS], tl.float32)
    if kept < in_no_cluster:
        query = head_query(attention.queries, heads, row, head)
        for begin in range(kept, in_no_cluster, _TOKENS):
            places = begin + tl.arange(0, _TOKENS)
            is_token = places < in_no_cluster
            positions = kept_positions(places, row)
            slots = slots_at(table_of(contexts.rows, row), positions, is_token, contexts.rows.page_size)
            keys = keys_at(attention, kv_head, slots, is_token, heads).to(tl.float32)
            scores = scaled(attention, tl.sum(keys * query[None, :], axis=1))
            lost += tl.where(is_token, tl.exp2((scores.to(tl.float64) - total).to(tl.float32)), 0.0)
    of_tokens = tl.sum(lost, axis=0)
    of_clusters = tl.zeros([_CUT], tl.float32)
    lists = of_kv_head * scored.clusters
    placed = tl.load(order.placed + of_kv_head)
    if taken == 0:
        # Nothing is put in order of which nothing is left.
        placed = 0
        slices: tl.constexpr = scored.clusters // _SLICE
        for slice_number in range(tl.cdiv(row.clusters, _SLICE)):
            count = count_of(tl.load(listed.totals + of_kv_head * slices + slice_number))
            each = tl.arange(0, _CUT)
            at = slice_number * _SLICE + each
            of_clusters += _cut_off(scored, listed, of_head, lists, at, each < count, total, each * 0)
    for begin in range(0, placed, _CUT):
        place = begin + tl.arange(0, _CUT)
        at = tl.load(order.steps + lists + place, mask=place < placed, other=0) // _STEPS
        before = tl.load(order.places + lists + at, mask=place < placed, other=0)
        left = tl.maximum(taken - before, 0)
        of_clusters += _cut_off(scored, listed, of_head, lists, at, place < placed, total, left)
    tl.store(cuts.lost + of_head, of_tokens + tl.sum(of_clusters, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _cut_off(
    scored: Scored,
    listed: Listed,
    of_head: tl.tensor,
    lists: tl.tensor,
    at: tl.tensor,
    is_listed: tl.tensor,
    total: tl.tensor,
    left: tl.tensor,
) -> tl.tensor:
    """Return which share of the mass listed clusters lose of which at most ``left`` tokens are left: float32."""
    number = tl.load(listed.numbers + lists + at, mask=is_listed, other=0)
    needed = tl.load(listed.needed + lists + at, mask=is_listed, other=0)
    steps = tl.load(scored.steps + of_head * scored.clusters + number, mask=is_listed, other=0)
    return share_of(steps, total, is_listed) * (needed - tl.minimum(left, needed)).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def head_query(queries: Vectors, heads: Heads, row: Row, head: tl.tensor) -> tl.tensor:
    """Return one query head's query: float32 [dim_block], 0 beyond the head dimension."""
    dims = tl.arange(0, heads.dim_block)
    addresses = queries.pointer + row.number.to(tl.int64) * queries.row_stride + head * queries.head_stride + dims
    return tl.load(addresses, mask=dims < heads.head_dim, other=0.0).to(tl.float32)
