"""Writing down what is attended to (``winnow_kernels.gpu.tactic``)."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.early_termination import TILE
from winnow_kernels.gpu.batch import WHOLE
from winnow_kernels.gpu.tactic_state import (
    GROUP_BLOCK,
    SLICE,
    count_read,
    kept_positions,
    needs_order,
    places_of,
    shape_of,
    slots_at,
    span_table,
    united,
)
from winnow_kernels.gpu.threshold import count_of, weight_of

KEPT_SPLITS: Final = 8
"""Programs among which the tokens in no cluster, of a row and KV head, are dealt out."""

_TILE = tl.constexpr(TILE)
_SLICE = tl.constexpr(SLICE)
_WHOLE = tl.constexpr(WHOLE)
_TOKENS = tl.constexpr(256)


@triton.jit  # type: ignore[untyped-decorator]
def slot_kernel(
    offsets_ptr: tl.tensor,
    table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    clustered_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    caps_ptr: tl.tensor,
    ordered_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    places_ptr: tl.tensor,
    head_shares_ptr: tl.tensor,
    shares_sum_ptr: tl.tensor,
    capped_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    selected_ptr: tl.tensor,
    table_stride: tl.tensor,
    capacity: tl.tensor,
    member_bytes: tl.tensor,
    width: tl.tensor,
    clusters: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    page_size: tl.constexpr,
    span: tl.constexpr,
    of_span: tl.constexpr,
    kept_splits: tl.constexpr,
    in_order: tl.constexpr,
) -> None:
    """Write one split's slots: sinks and the newest tile, then members of clusters, then what else is in no cluster.

    The first ``kept_splits`` programs of a row and KV head have the tokens in no cluster, and the very first of them
    what is said of the selection as a whole; the others have each a slice of the clusters.
    """
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share, cap = tl.load(shares_ptr + row), tl.load(caps_ptr + row)
    length, sinks, clustered, count = shape_of(lengths_ptr, clustered_ptr, sinks_ptr, row, span, of_span)
    if share == 0:
        return
    of_kv_head = row.to(tl.int64) * kv_heads + kv_head
    slices: tl.constexpr = clusters // _SLICE
    # Of an idle row the tokens in no cluster alone are too many, whatever its totals say.
    totals, kept, taken, wanted = united(totals_ptr + of_kv_head * slices, length, clustered, count, cap, slices)
    table_ptr += row * table_stride
    slots_ptr += of_kv_head * width
    front = tl.minimum(kept, sinks + _TILE)
    if part < kept_splits:
        if part == 0:
            heads = tl.arange(0, GROUP_BLOCK)
            of_heads = of_kv_head * group + heads
            attended = tl.load(head_shares_ptr + of_heads, mask=(heads < group) & (taken >= 0), other=1.0)
            so_far = tl.load(shares_sum_ptr + of_heads, mask=heads < group, other=0.0)
            tl.store(shares_sum_ptr + of_heads, so_far + attended, mask=heads < group)
            tl.store(selected_ptr + of_kv_head, tl.where(taken < 0, _WHOLE, kept + taken))
            if taken >= 0:
                count_read(counts_ptr, row, taken * member_bytes)
                if length - clustered + wanted > kept + taken:
                    tl.store(capped_ptr + row, 1)
        for begin in range(part * _TOKENS, tl.where(taken < 0, 0, kept), kept_splits * _TOKENS):
            places = begin + tl.arange(0, _TOKENS)
            positions = kept_positions(places, length, sinks)
            slots = slots_at(table_ptr, positions, places < kept, page_size)
            tl.store(slots_ptr + tl.where(places < front, places, places + taken), slots, mask=places < kept)
        return

    slice_number = part - kept_splits
    each = tl.arange(0, slices)
    before = tl.sum(tl.where(each < slice_number, weight_of(totals), 0), axis=0)
    total = tl.sum(tl.where(each == slice_number, totals, 0), axis=0)
    listed = count_of(total)
    of_slice = of_kv_head * clusters + slice_number * _SLICE
    is_ordered = needs_order(taken, wanted, tl.load(ordered_ptr + row))
    offsets_ptr += kv_head.to(tl.int64) * capacity * span
    table_ptr = span_table(table_ptr, sinks, span, page_size)
    for begin in range(0, tl.where(taken > 0, weight_of(total), 0), _TOKENS):
        tokens = begin + tl.arange(0, _TOKENS)
        is_token = tokens < weight_of(total)
        place = places_of(starts_ptr + of_slice, tokens, listed, _SLICE)
        rank = tokens - tl.load(starts_ptr + of_slice + place, mask=is_token, other=0)
        first = tl.load(firsts_ptr + of_slice + place, mask=is_token, other=0)
        number = tl.load(listed_ptr + of_slice + place, mask=is_token, other=0)
        to = before + tokens
        if in_order:
            to = tl.where(is_ordered, tl.load(places_ptr + of_slice + place, mask=is_token, other=0) + rank, to)
        offset = tl.load(offsets_ptr + first + rank, mask=is_token, other=0).to(tl.int32)
        slots = slots_at(table_ptr, number // of_span * span + offset, is_token, page_size)
        # The cap cuts what is behind it.
        tl.store(slots_ptr + front + to, slots, mask=is_token & (to < taken))
