"""Writing down what is attended to (``selection``)."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.batch import WHOLE_TO_THE_END
from winnow_kernels.policies.tactic.gpu.state import (
    FIT_REFERENCE,
    FIT_TOTAL,
    FITS,
    GROUP_BLOCK,
    KEPT_BLOCK,
    NOTHING,
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
from winnow_kernels.selection.gpu_threshold import count_of, weight_of

KEPT_SPLITS: Final = 8
"""Programs among which the tokens in no cluster, of a row and KV head, are dealt out."""

_SLICE = tl.constexpr(SLICE)
_OF_BLOCK = tl.constexpr(KEPT_BLOCK)
_TO_THE_END = tl.constexpr(WHOLE_TO_THE_END)
_TOKENS = tl.constexpr(256)


@triton.jit  # type: ignore[untyped-decorator]
def slot_kernel(  # noqa: PLR0915 - its two halves share most of what they read
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
    targets_ptr: tl.tensor,
    kept_placed_ptr: tl.tensor,
    kept_targets_ptr: tl.tensor,
    fits_ptr: tl.tensor,
    head_shares_ptr: tl.tensor,
    beliefs_ptr: tl.tensor,
    capped_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    selected_ptr: tl.tensor,
    table_stride: tl.tensor,
    capacity: tl.tensor,
    member_bytes: tl.tensor,
    width: tl.tensor,
    kept_blocks: tl.tensor,
    clusters: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    page_size: tl.constexpr,
    span: tl.constexpr,
    of_span: tl.constexpr,
    kept_splits: tl.constexpr,
    in_order: tl.constexpr,
) -> None:
    """Write one split's slots: in order, or else sinks, what else is in no cluster, and then members of clusters.

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
    is_placed = needs_order(taken, wanted, tl.load(ordered_ptr + row))
    is_read_in_order = taken < -1
    if in_order:
        is_read_in_order = tl.load(kept_placed_ptr + of_kv_head * 2) > 0
    if part < kept_splits:
        if part == 0:
            heads = tl.arange(0, GROUP_BLOCK)
            of_heads = of_kv_head * group + heads
            is_believed = (heads < group) & (taken >= 0)
            of_selected = tl.load(head_shares_ptr + of_heads, mask=is_believed, other=1.0)
            whole_mass = tl.load(fits_ptr + of_heads * FITS + FIT_REFERENCE, mask=is_believed, other=0.0)
            whole_mass += tl.log2(tl.load(fits_ptr + of_heads * FITS + FIT_TOTAL, mask=is_believed, other=1.0))
            selected = tl.where(is_believed, whole_mass + tl.log2(tl.maximum(of_selected, 1e-30)), NOTHING)
            rest = tl.where(
                is_believed & (of_selected < 1), whole_mass + tl.log2(tl.maximum(1 - of_selected, 1e-30)), NOTHING
            )
            tl.store(beliefs_ptr + of_heads * 2, selected.to(tl.float32), mask=heads < group)
            tl.store(beliefs_ptr + of_heads * 2 + 1, rest.to(tl.float32), mask=heads < group)
            # What has no order is read to its end.
            tl.store(selected_ptr + of_kv_head, tl.where(taken < 0, _TO_THE_END, kept + taken))
            if taken >= 0:
                count_read(counts_ptr, row, taken * member_bytes)
                if length - clustered + wanted > kept + taken:
                    tl.store(capped_ptr + row, 1)
        for begin in range(part * _TOKENS, tl.where(taken < 0, 0, kept), kept_splits * _TOKENS):
            places = begin + tl.arange(0, _TOKENS)
            positions = kept_positions(places, length, sinks)
            slots = slots_at(table_ptr, positions, places < kept, page_size)
            to = places
            if in_order:
                target_ptr = kept_targets_ptr + of_kv_head * kept_blocks + places // _OF_BLOCK
                target = tl.load(target_ptr, mask=is_read_in_order & (places < kept), other=0)
                to = tl.where(is_read_in_order, target + places % _OF_BLOCK, to)
            tl.store(slots_ptr + to, slots, mask=places < kept)
        return

    slice_number = part - kept_splits
    each = tl.arange(0, slices)
    before = tl.sum(tl.where(each < slice_number, weight_of(totals), 0), axis=0)
    total = tl.sum(tl.where(each == slice_number, totals, 0), axis=0)
    listed = count_of(total)
    of_slice = of_kv_head * clusters + slice_number * _SLICE
    offsets_ptr += kv_head.to(tl.int64) * capacity * span
    table_ptr = span_table(table_ptr, sinks, span, page_size)
    for begin in range(0, tl.where(taken > 0, weight_of(total), 0), _TOKENS):
        tokens = begin + tl.arange(0, _TOKENS)
        is_token = tokens < weight_of(total)
        place = places_of(starts_ptr + of_slice, tokens, listed, _SLICE)
        rank = tokens - tl.load(starts_ptr + of_slice + place, mask=is_token, other=0)
        first = tl.load(firsts_ptr + of_slice + place, mask=is_token, other=0)
        number = tl.load(listed_ptr + of_slice + place, mask=is_token, other=0)
        among_clusters = before + tokens
        to = kept + among_clusters
        if in_order:
            in_place = tl.load(places_ptr + of_slice + place, mask=is_token & is_placed, other=0) + rank
            among_clusters = tl.where(is_placed, in_place, among_clusters)
            target = tl.load(targets_ptr + of_slice + place, mask=is_token & is_read_in_order, other=0) + rank
            to = tl.where(is_read_in_order, target, kept + among_clusters)
        offset = tl.load(offsets_ptr + first + rank, mask=is_token, other=0).to(tl.int32)
        slots = slots_at(table_ptr, number // of_span * span + offset, is_token, page_size)
        # The cap cuts what is behind it.
        tl.store(slots_ptr + to, slots, mask=is_token & (among_clusters < taken))
