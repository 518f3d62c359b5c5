"""Writing down what is attended to: the kept tokens, then the others in the context's order."""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.batch import NO_MASS, WHOLE_TO_THE_END, Count
from winnow_kernels.decode.coded_tokens import WHOLE_SHARE
from winnow_kernels.kernel_arguments import Counts, Rows, Selected
from winnow_kernels.policies.lowbit_top_p.gpu.candidates import marks_at
from winnow_kernels.policies.lowbit_top_p.gpu.keys import key_of
from winnow_kernels.policies.lowbit_top_p.gpu.order import order_of
from winnow_kernels.policies.lowbit_top_p.gpu.state import (
    MARKS,
    Policies,
    Scratch,
    Shape,
    bounds_of,
    counted_weights,
    is_in_order,
    kept_positions,
    logarithm_of,
    weight_of_kept,
)
from winnow_kernels.selection.gpu_slots import slots_at

_MARKS = tl.constexpr(MARKS)
_UNITS = tl.constexpr(256)
_LISTED = tl.constexpr(64)
_KEPT = tl.constexpr(128)
_WHOLE = tl.constexpr(WHOLE_TO_THE_END)
_WHOLE_SHARE = tl.constexpr(WHOLE_SHARE)
_NOTHING = tl.constexpr(NO_MASS)
_READ_BYTES = tl.constexpr(int(Count.READ_BYTES))


@triton.jit  # type: ignore[untyped-decorator]
def keep_taken(
    pair: tl.tensor,
    part: tl.tensor,
    sharing: tl.tensor,
    units: tl.tensor,
    shape: Shape,
    scratch: Scratch,
    by_key: tl.constexpr,
) -> None:
    """Leave in the lists of this program's units what is taken, and what ties with the lowest key.

    Args:
        pair: of the units.
        part: the number of this program among those of the pair.
        sharing: programs that share them.
        units: all units of the pair.
        shape: of the layer.
        scratch: with the lists and the cuts.
        by_key: whether there are budgets, or shares.
    """
    head = tl.arange(0, shape.padded_group)
    cuts = tl.load(
        scratch.cuts + pair * shape.padded_group + head, mask=head < shape.group, other=_MARKS, cache_modifier=".cg"
    )
    key_cut = tl.load(scratch.key_cuts + pair, cache_modifier=".cg")
    for unit in range(part, units, sharing):
        counts_ptr = scratch.counts + pair * scratch.units + unit
        of_unit = pair * scratch.tokens + unit * shape.unit
        list_ptr = scratch.local + of_unit
        candidates = tl.load(counts_ptr)
        count, ties = candidates * 0, candidates * 0
        for begin in range(0, candidates, _LISTED):
            each = begin + tl.arange(0, _LISTED)
            is_listed = each < candidates
            # Without waiting for how many there are.
            place = tl.load(list_ptr + each, mask=each < shape.unit, other=0).to(tl.int32) & (shape.unit - 1)
            entry = place
            if by_key:
                keys = tl.load(scratch.keys + of_unit + each, mask=each < shape.unit, other=0).to(tl.int32)
                is_tie = is_listed & (keys == key_cut)
                is_taken = is_listed & (keys >= key_cut)
                ties += tl.sum(is_tie.to(tl.int32), 0)
                entry = tl.where(is_tie, -1 - place, place)
            else:
                marks = marks_at(scratch, of_unit + place, each < shape.unit, shape)
                is_taken = is_listed & (tl.max((marks >= cuts[None, :]).to(tl.int32), 1) > 0)
            one = is_taken.to(tl.int32)
            # Nothing is written where other threads have yet to read.
            tl.debug_barrier()
            tl.store(list_ptr + count + tl.cumsum(one, 0) - 1, entry.to(tl.int16), mask=is_taken)
            count += tl.sum(one, 0)
        tl.store(counts_ptr, count)
        if by_key:
            tl.store(scratch.ties + pair * scratch.units + unit, ties)


@triton.jit  # type: ignore[untyped-decorator]
def write_taken(
    row: tl.tensor,
    pair: tl.tensor,
    part: tl.tensor,
    sharing: tl.tensor,
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    selected: Selected,
    window: tl.constexpr,
    by_key: tl.constexpr,
    in_order: tl.constexpr,
) -> None:
    """Write what is left in the lists of this program's units as slots, and as positions if it is to be put in order.

    Args:
        row: of the batch.
        pair: of the units.
        part: the number of this program among those of the pair.
        sharing: programs that share them.
        rows: of the batch.
        policies: of the rows.
        shape: of the layer.
        scratch: with the lists; gets the masses of what is taken.
        selected: gets the slots.
        window: newest tokens that are kept.
        by_key: whether there are budgets, or shares.
        in_order: whether the order of a selection may matter.
    """
    head = tl.arange(0, shape.padded_group)
    of_heads = pair * shape.padded_group + head
    length, scored, sinks = bounds_of(rows, policies, row, window)
    kept = length - scored + sinks
    spare = 0
    if by_key:
        spare = tl.load(scratch.key_ties + pair, cache_modifier=".cg")
    table_ptr = rows.page_table + row * rows.table_stride
    of_tokens = pair * scratch.tokens
    floors = tl.load(scratch.floors + of_heads)
    for unit in range(part, tl.cdiv(scored, shape.unit), sharing):
        of_unit = pair * scratch.units + unit
        listed, ties = tl.load(scratch.counts + of_unit), 0
        before = listed_before(scratch.counts, pair, unit, scratch)
        if by_key:
            ties = listed_before(scratch.ties, pair, unit, scratch)
            before = before - ties + tl.minimum(ties, spare)
        list_ptr = scratch.local + of_tokens + unit * shape.unit
        taken = tl.zeros([shape.padded_group], tl.float32)
        for begin in range(0, listed, _LISTED):
            each = begin + tl.arange(0, _LISTED)
            is_taken = each < listed
            entry = tl.load(list_ptr + each, mask=each < shape.unit, other=0).to(tl.int32)
            place = each
            if by_key:
                is_tie = is_taken & (entry < 0)
                entry = tl.where(is_tie, -1 - entry, entry)
                is_taken &= ties + tl.cumsum(is_tie.to(tl.int32), 0) <= tl.where(is_tie, spare, 0x7FFFFFFF)
                place = tl.cumsum(is_taken.to(tl.int32), 0) - 1
                ties += tl.sum(is_tie.to(tl.int32), 0)
            position = unit * shape.unit + entry
            slot = slots_at(table_ptr, position, is_taken, rows.page_size)
            is_written = is_taken & (kept + before + place < selected.width)
            tl.store(selected.slots + pair * selected.width + kept + before + place, slot, mask=is_written)
            marks = marks_at(scratch, of_tokens + position, is_taken, shape)
            taken += tl.sum(counted_weights(marks, floors), 0)
            if in_order:
                is_listed = is_taken & is_in_order(policies, row)
                at = of_tokens + before + place
                tl.store(scratch.listed + at, position, mask=is_listed)
                totals = tl.load(scratch.totals + of_heads)
                orders = order_of(key_of(marks, floors, totals, shape))
                tl.store(scratch.orders + at, orders.to(tl.uint8), mask=is_listed)
            if by_key:
                before += tl.sum(is_taken.to(tl.int32), 0)
        tl.store(scratch.taken + of_unit * shape.padded_group + head, taken)


@triton.jit  # type: ignore[untyped-decorator]
def write_kept(
    row: tl.tensor,
    kv_head: tl.tensor,
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    selected: Selected,
    read: Counts,
    beliefs_ptr: tl.tensor,
    key_bytes: tl.tensor,
    code_bytes: tl.tensor,
    window: tl.constexpr,
    by_key: tl.constexpr,
    in_order: tl.constexpr,
) -> None:
    """Write what a pair keeps in any case, its count, and what is believed of the masses.

    Args:
        row: of the batch.
        kv_head: of the row.
        rows: of the batch.
        policies: of the rows.
        shape: of the layer.
        scratch: with the masses of what is taken.
        selected: gets the slots and the count.
        read: gets the bytes that were read.
        beliefs_ptr: ``ReportedShares.beliefs``.
        key_bytes: bytes of a key.
        code_bytes: bytes of its codes.
        window: newest tokens that are kept.
        by_key: whether there are budgets, or shares.
        in_order: whether the order of a selection may matter.
    """
    pair = row * shape.kv_heads + kv_head
    head = tl.arange(0, shape.padded_group)
    of_heads = pair * shape.padded_group + head
    length, scored, sinks = bounds_of(rows, policies, row, window)
    kept = length - scored + sinks
    units = tl.cdiv(scored, shape.unit)
    table_ptr = rows.page_table + row * rows.table_stride
    bases = tl.load(scratch.bases + of_heads)
    others = listed_before(scratch.counts, pair, units, scratch)
    if by_key:
        spare = tl.load(scratch.key_ties + pair, cache_modifier=".cg")
        all_ties = listed_before(scratch.ties, pair, units, scratch)
        others += tl.minimum(all_ties, spare) - all_ties
    for begin in range(0, kept, _KEPT):
        own = begin + tl.arange(0, _KEPT)
        is_kept = (own < kept) & (own < selected.width)
        slot = slots_at(table_ptr, kept_positions(own, length, scored), is_kept, rows.page_size)
        tl.store(selected.slots + pair * selected.width + own, slot, mask=is_kept)
    tokens = kept + others
    # A cap that would be read whole by itself is none.
    cap = tl.load(policies.most + row)
    limit = tl.maximum(cap, kept)
    limit = tl.where((cap == 0) | (limit > length * _WHOLE_SHARE), tokens, tl.minimum(tokens, limit))
    is_whole = (limit > length * _WHOLE_SHARE) | (limit > selected.width)
    if in_order:
        tl.store(scratch.others + pair, tl.where(is_whole, 0, others))
    tl.store(selected.counts + pair, tl.where(is_whole, _WHOLE, tokens))
    read_bytes = kept.to(tl.int64) * key_bytes + (scored * code_bytes).to(tl.int64)
    tl.atomic_add(read.pointer + row * read.row_stride + _READ_BYTES, read_bytes, sem="relaxed")
    all_taken = weight_of_kept(tl.load(scratch.kept + of_heads), bases)
    for begin in range(0, units, _UNITS):
        each = begin + tl.arange(0, _UNITS)
        taken_ptr = scratch.taken + (pair * scratch.units + each)[:, None] * shape.padded_group
        is_unit = (each < units)[:, None]
        of_units = tl.load(taken_ptr + head[None, :], mask=is_unit, other=0.0, cache_modifier=".cg")
        all_taken += tl.sum(of_units, 0)
    rest = tl.maximum(tl.load(scratch.totals + of_heads) - all_taken, 0.0)
    tl.store(scratch.rests + of_heads, rest)
    believed = beliefs_ptr + ((row * shape.kv_heads + kv_head) * shape.group + head) * 2
    is_head = head < shape.group
    tl.store(believed, tl.where(is_whole, _NOTHING, logarithm_of(all_taken, bases)), mask=is_head)
    of_rest = tl.where(rest > 0, logarithm_of(rest, bases), _NOTHING)
    tl.store(believed + 1, tl.where(is_whole, _NOTHING, of_rest), mask=is_head)


@triton.jit  # type: ignore[untyped-decorator]
def listed_before(counts_ptr: tl.tensor, pair: tl.tensor, units: tl.tensor, scratch: Scratch) -> tl.tensor:
    """Return how many tokens a pair's first ``units`` have, by the counts of all units: int32."""
    total = units * 0
    for begin in range(0, units, _UNITS):
        unit = begin + tl.arange(0, _UNITS)
        counts = tl.load(counts_ptr + pair * scratch.units + unit, mask=unit < units, other=0, cache_modifier=".cg")
        total += tl.sum(counts, 0)
    return total
