"""Selections in order, for rows that may stop early or have a cap: listed tokens are counted by steps, then placed."""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.decode.predicted_attention import ORDER_KEYS
from winnow_kernels.kernel_arguments import Rows, Selected
from winnow_kernels.policies.lowbit_top_p.gpu.candidates import marks_at
from winnow_kernels.policies.lowbit_top_p.gpu.state import (
    CHUNK,
    ORDERS,
    Policies,
    Scratch,
    Shape,
    bounds_of,
    counted_weights,
    is_in_order,
    logarithm_of,
)
from winnow_kernels.selection.gpu_partition import own_share, owner_of
from winnow_kernels.selection.gpu_slots import slots_at

_CHUNK = tl.constexpr(CHUNK)
_CHUNKS = tl.constexpr(32)
_ORDERS = tl.constexpr(ORDERS)
_ORDER_KEYS = tl.constexpr(ORDER_KEYS)


@triton.jit  # type: ignore[untyped-decorator]
def order_of(keys: tl.tensor) -> tl.tensor:
    """Return in which step of the order tokens with these keys are, the highest first: int32."""
    return _ORDERS - 1 - keys // _ORDER_KEYS


@triton.jit  # type: ignore[untyped-decorator]
def _chunks_of(
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    all_pairs: tl.tensor,
    pairs: tl.tensor,
    window: tl.constexpr,
) -> tl.tensor:
    """Return how many chunks of listed tokens each pair has whose order matters: int32 [pairs]."""
    in_batch = all_pairs < pairs
    row = tl.where(in_batch, all_pairs // shape.kv_heads, 0)
    _, scored, _ = bounds_of(rows, policies, row, window)
    listed = tl.load(scratch.others + all_pairs, mask=in_batch & (scored > 0) & is_in_order(policies, row), other=0)
    return tl.cdiv(listed, _CHUNK)


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def order_count_kernel(
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    pairs: tl.tensor,
    window: tl.constexpr,
    pair_block: tl.constexpr,
) -> None:
    """Count the listed tokens of each chunk by their steps."""
    chunks = _chunks_of(rows, policies, shape, scratch, tl.arange(0, pair_block), pairs, window)
    own, end = own_share(chunks)
    for each in range(own, end):
        pair, first, _after = owner_of(each, chunks)
        of_pair = pair.to(tl.int64)
        chunk = each - first
        place = chunk * _CHUNK + tl.arange(0, _CHUNK)
        is_listed = place < tl.load(scratch.others + pair)
        orders = tl.load(scratch.orders + of_pair * scratch.tokens + place, mask=is_listed, other=0).to(tl.int32)
        counts_ptr = scratch.order_counts + (of_pair * scratch.chunks + chunk) * _ORDERS + tl.arange(0, _ORDERS)
        tl.store(counts_ptr, tl.histogram(orders, _ORDERS, mask=is_listed))


@triton.jit  # type: ignore[untyped-decorator]
def order_scan_kernel(
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    window: tl.constexpr,
    steps: tl.constexpr,
) -> None:
    """Count, by step, the tokens before each chunk and those of all chunks. Grid: rows × KV heads × ORDERS / steps."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, scored, _ = bounds_of(rows, policies, row, window)
    if (scored > 0) & is_in_order(policies, row):
        pair = row * shape.kv_heads + kv_head
        chunks = tl.cdiv(tl.load(scratch.others + pair), _CHUNK)
        step = tl.program_id(2) * steps + tl.arange(0, steps)
        in_earlier = tl.zeros([steps], tl.int32)
        for begin in range(0, chunks, _CHUNKS):
            chunk = begin + tl.arange(0, _CHUNKS)
            is_chunk = (chunk < chunks)[:, None]
            places = (pair * scratch.chunks + chunk)[:, None] * _ORDERS + step[None, :]
            counts = tl.load(scratch.order_counts + places, mask=is_chunk, other=0)
            before = in_earlier[None, :] + tl.cumsum(counts, 0) - counts
            tl.store(scratch.order_before + places, before, mask=is_chunk)
            in_earlier += tl.sum(counts, 0)
        tl.store(scratch.order_totals + pair * _ORDERS + step, in_earlier)


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def order_kernel(
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    selected: Selected,
    pairs: tl.tensor,
    window: tl.constexpr,
    pair_block: tl.constexpr,
) -> None:
    """Write the slots of what is listed in order, as far as the cap, and add up what that cuts off.

    In a step the first in the context come first.
    """
    chunks = _chunks_of(rows, policies, shape, scratch, tl.arange(0, pair_block), pairs, window)
    head = tl.arange(0, shape.padded_group)
    step = tl.arange(0, _ORDERS)
    own, end = own_share(chunks)
    for each in range(own, end):
        pair, first, _after = owner_of(each, chunks)
        chunk = each - first
        row = (pair // shape.kv_heads).to(tl.int64)
        length, scored, sinks = bounds_of(rows, policies, row, window)
        kept = length - scored + sinks
        of_pair = pair.to(tl.int64)
        # Before this chunk's tokens of a step come those of earlier steps, and those of earlier chunks in it.
        of_chunk = (of_pair * scratch.chunks + chunk) * _ORDERS
        in_all = tl.load(scratch.order_totals + of_pair * _ORDERS + step)
        before = tl.cumsum(in_all, 0) - in_all + tl.load(scratch.order_before + of_chunk + step)
        # In the place of the chunk's counts, which nobody needs any more: loaded from there by each token's step.
        before_ptr = scratch.order_counts + of_chunk
        tl.store(before_ptr + step, before)
        tl.debug_barrier()
        inside = tl.arange(0, _CHUNK)
        place = chunk * _CHUNK + inside
        is_listed = place < tl.load(scratch.others + pair)
        of_tokens = of_pair * scratch.tokens + place
        orders = tl.load(scratch.orders + of_tokens, mask=is_listed, other=_ORDERS - 1).to(tl.int32)
        same = (orders[None, :] == orders[:, None]) & (inside[None, :] < inside[:, None])
        rank = kept + tl.load(before_ptr + orders) + tl.sum(same.to(tl.int32), 1)
        cap = tl.load(policies.most + row)
        is_cut = is_listed & (cap > 0) & (rank >= cap)
        position = tl.load(scratch.listed + of_tokens, mask=is_listed, other=0)
        slot = slots_at(rows.page_table + row * rows.table_stride, position, is_listed, rows.page_size)
        is_written = is_listed & (rank < selected.width)
        tl.store(selected.slots + of_pair * selected.width + rank, slot, mask=is_written)
        marks = marks_at(scratch, of_pair * scratch.tokens + position, is_cut, shape)
        floors = tl.load(scratch.floors + of_pair * shape.padded_group + head)
        lost = tl.sum(counted_weights(marks, floors), 0)
        tl.store(scratch.lost + (of_pair * scratch.chunks + chunk) * shape.padded_group + head, lost)


@triton.jit  # type: ignore[untyped-decorator]
def cap_kernel(
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    selected: Selected,
    beliefs_ptr: tl.tensor,
    capped_ptr: tl.tensor,
    window: tl.constexpr,
) -> None:
    """Cut the selections that are longer than their caps, and believe less of them. Grid: rows × KV heads."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cap = tl.load(policies.most + row)
    length, scored, sinks = bounds_of(rows, policies, row, window)
    kept = length - scored + sinks
    pair = row * shape.kv_heads + kv_head
    tokens = tl.load(selected.counts + pair)
    if (cap > 0) & (scored > 0) & (tokens > tl.maximum(cap, kept)):
        head = tl.arange(0, shape.padded_group)
        of_heads = pair * shape.padded_group + head
        bases = tl.load(scratch.bases + of_heads)
        lost = tl.zeros([shape.padded_group], tl.float32)
        chunks = tl.cdiv(tokens - kept, _CHUNK)
        for begin in range(0, chunks, _CHUNKS):
            each = begin + tl.arange(0, _CHUNKS)
            lost_ptr = scratch.lost + (pair * scratch.chunks + each)[:, None] * shape.padded_group + head[None, :]
            lost += tl.sum(tl.load(lost_ptr, mask=(each < chunks)[:, None], other=0.0), 0)
        tl.store(selected.counts + pair, tl.maximum(cap, kept))
        tl.store(capped_ptr + row, 1)
        rest = tl.load(scratch.rests + of_heads) + lost
        selected_mass = tl.load(scratch.totals + of_heads) - rest
        believed = beliefs_ptr + (pair * shape.group + head) * 2
        tl.store(believed, logarithm_of(selected_mass, bases), mask=head < shape.group)
        tl.store(believed + 1, logarithm_of(rest, bases), mask=head < shape.group)
