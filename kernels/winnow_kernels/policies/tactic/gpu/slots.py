"""Writing down what is attended to (``selection``)."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.batch import WHOLE_TO_THE_END
from winnow_kernels.kernel_arguments import Heads, Selected
from winnow_kernels.policies.tactic.gpu.contexts import (
    GROUP_BLOCK,
    NOTHING,
    count_read,
    kept_positions,
    member_slots,
    needs_order,
    offsets_of,
    places_of,
    row_at,
    span_table,
    table_of,
    united,
)
from winnow_kernels.policies.tactic.gpu.state import (
    KEPT_BLOCK,
    SLICE,
    Contexts,
    Cuts,
    Kept,
    Listed,
    Ordered,
    Outside,
    Scored,
    TacticStatistics,
)
from winnow_kernels.selection.gpu_slots import slots_at
from winnow_kernels.selection.gpu_threshold import count_of, weight_of

KEPT_SPLITS: Final = 8
"""Programs among which the tokens in no cluster, of a row and KV head, are dealt out."""

_SLICE = tl.constexpr(SLICE)
_OF_BLOCK = tl.constexpr(KEPT_BLOCK)
_TO_THE_END = tl.constexpr(WHOLE_TO_THE_END)
_KEPT_SPLITS = tl.constexpr(KEPT_SPLITS)
_TOKENS = tl.constexpr(256)


@triton.jit  # type: ignore[untyped-decorator]
def slot_kernel(  # noqa: PLR0915 - its two halves share most of what they read
    contexts: Contexts,
    heads: Heads,
    counts_ptr: tl.tensor,
    scored: Scored,
    in_no_cluster: Kept,
    cuts: Cuts,
    outside: Outside,
    listed: Listed,
    order: Ordered,
    statistics: TacticStatistics,
    selected: Selected,
    member_bytes: tl.tensor,
    in_order: tl.constexpr,
) -> None:
    """Write one split's slots: in order, or else sinks, what else is in no cluster, and then members of clusters.

    The first ``KEPT_SPLITS`` programs of a row and KV head have the tokens in no cluster, and the very first of them
    what is said of the selection as a whole; the others have each a slice of the clusters.
    """
    part, kv_head = tl.program_id(0), tl.program_id(1)
    row = row_at(contexts, tl.program_id(2))
    if row.share == 0:
        return
    of_kv_head = row.number.to(tl.int64) * heads.kv_heads + kv_head
    slices: tl.constexpr = scored.clusters // _SLICE
    # Of an idle row the tokens in no cluster alone are too many, whatever its totals say.
    totals, kept, taken, wanted = united(listed.totals + of_kv_head * slices, row, scored.clusters)
    slots_ptr = selected.slots + of_kv_head * selected.width
    is_placed = needs_order(taken, wanted, tl.load(contexts.asked.by_priority + row.number))
    is_read_in_order = taken < -1
    if in_order:
        is_read_in_order = tl.load(in_no_cluster.placed + of_kv_head * 2) > 0
    if part < _KEPT_SPLITS:
        if part == 0:
            filled = tl.cdiv(row.clusters, _SLICE)
            _store_beliefs(statistics, cuts, outside, of_kv_head, taken >= 0, filled, slices, heads.group)
            # What has no order is read to its end.
            tl.store(selected.counts + of_kv_head, tl.where(taken < 0, _TO_THE_END, kept + taken))
            if taken >= 0:
                count_read(counts_ptr, row, taken * member_bytes)
                if row.length - row.clustered + wanted > kept + taken:
                    tl.store(statistics.capped + row.number, 1)
        for begin in range(part * _TOKENS, tl.where(taken < 0, 0, kept), _KEPT_SPLITS * _TOKENS):
            places = begin + tl.arange(0, _TOKENS)
            positions = kept_positions(places, row)
            slots = slots_at(table_of(contexts.rows, row), positions, places < kept, contexts.rows.page_size)
            to = places
            if in_order:
                target_ptr = in_no_cluster.targets + of_kv_head * in_no_cluster.blocks + places // _OF_BLOCK
                target = tl.load(target_ptr, mask=is_read_in_order & (places < kept), other=0)
                to = tl.where(is_read_in_order, target + places % _OF_BLOCK, to)
            tl.store(slots_ptr + to, slots, mask=places < kept)
        return

    slice_number = part - _KEPT_SPLITS
    each = tl.arange(0, slices)
    before = tl.sum(tl.where(each < slice_number, weight_of(totals), 0), axis=0)
    total = tl.sum(tl.where(each == slice_number, totals, 0), axis=0)
    of_slice = of_kv_head * scored.clusters + slice_number * _SLICE
    offsets_ptr = offsets_of(contexts.tables, kv_head)
    table_ptr = span_table(contexts, row)
    for begin in range(0, tl.where(taken > 0, weight_of(total), 0), _TOKENS):
        tokens = begin + tl.arange(0, _TOKENS)
        is_token = tokens < weight_of(total)
        place = of_slice + places_of(listed.starts + of_slice, tokens, count_of(total), _SLICE)
        rank = tokens - tl.load(listed.starts + place, mask=is_token, other=0)
        first = tl.load(listed.firsts + place, mask=is_token, other=0)
        number = tl.load(listed.numbers + place, mask=is_token, other=0)
        among_clusters = before + tokens
        to = kept + among_clusters
        if in_order:
            in_place = tl.load(order.places + place, mask=is_token & is_placed, other=0) + rank
            among_clusters = tl.where(is_placed, in_place, among_clusters)
            target = tl.load(order.targets + place, mask=is_token & is_read_in_order, other=0) + rank
            to = tl.where(is_read_in_order, target, kept + among_clusters)
        slots = member_slots(contexts, table_ptr, offsets_ptr + first + rank, number, is_token)
        # The cap cuts what is behind it.
        tl.store(slots_ptr + to, slots, mask=is_token & (among_clusters < taken))


@triton.jit  # type: ignore[untyped-decorator]
def _store_beliefs(
    statistics: TacticStatistics,
    cuts: Cuts,
    outside: Outside,
    of_kv_head: tl.tensor,
    is_believed: tl.tensor,
    filled: tl.tensor,
    slices: tl.constexpr,
    group: tl.constexpr,
) -> None:
    """Store what is believed of the mass that is selected and of the rest, of each query head; else nothing.

    Args:
        statistics: get the beliefs.
        cuts: masses.
        outside: what was added up of each slice.
        of_kv_head: number of the KV head, through all rows.
        is_believed: whether anything is.
        filled: slices that have clusters.
        slices: that a row can have, at least as many.
        group: query heads.
    """
    members = tl.arange(0, GROUP_BLOCK)
    of_heads = of_kv_head * group + members
    is_head = members < group
    part = tl.arange(0, slices)
    shares_ptr = outside.shares + (of_heads[:, None] * slices + part[None, :]) * 3
    is_part = is_head[:, None] & (part < filled)[None, :]
    left = tl.sum(tl.load(shares_ptr, mask=is_part, other=0.0), axis=1)
    weigh = tl.sum(tl.load(shares_ptr + 1, mask=is_part, other=0.0), axis=1)
    predicted = tl.sum(tl.load(shares_ptr + 2, mask=is_part, other=0.0), axis=1)
    lost = tl.load(cuts.lost + of_heads, mask=is_head, other=0.0)
    total = tl.load(cuts.totals + of_heads, mask=is_head, other=0.0)
    of_selected = 1 - left - lost
    # What the sampled tokens weigh, by how much they were predicted to.
    rest = left * tl.where(predicted > 0, weigh / tl.where(predicted > 0, predicted, 1.0), 1.0) + lost
    selected = total + tl.log2(tl.maximum(of_selected, 1e-30))
    of_rest = total + tl.log2(tl.maximum(rest, 1e-30))
    beliefs_ptr = statistics.reported.beliefs + of_heads * 2
    tl.store(beliefs_ptr, tl.where(is_believed, selected, NOTHING).to(tl.float32), mask=is_head)
    tl.store(beliefs_ptr + 1, tl.where(is_believed & (rest > 0), of_rest, NOTHING).to(tl.float32), mask=is_head)
