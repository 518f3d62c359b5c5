"""Keys of tokens: what share of the attention they hold in the mean over a group.

They say what a fixed budget takes, and in which order tokens are read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.decode.predicted_attention import KEY_STEPS, LOWEST_KEY, STEPS
from winnow_kernels.kernel_arguments import Rows
from winnow_kernels.policies.lowbit_top_p.gpu.candidates import list_candidates, marks_at
from winnow_kernels.policies.lowbit_top_p.gpu.state import (
    KEYS,
    MARKS,
    UNIT,
    UNIT_MARK,
    Anchors,
    Policies,
    Scratch,
    Shape,
    bounds_of,
    counted_weights,
)

_KEYS = tl.constexpr(KEYS)
_KEY_STEPS = tl.constexpr(float(KEY_STEPS))
_LOWEST = tl.constexpr(LOWEST_KEY)
_SMALLEST = tl.constexpr(2.0**-100)
_MARKS = tl.constexpr(MARKS)
_STEPS = tl.constexpr(float(STEPS))
_UNIT = tl.constexpr(UNIT)
_UNIT_MARK = tl.constexpr(UNIT_MARK)
_LISTED = tl.constexpr(64)
_COUNTED_BELOW = tl.constexpr(2 * KEY_STEPS)


@triton.jit  # type: ignore[untyped-decorator]
def key_of(marks: tl.tensor, floors: tl.tensor, totals: tl.tensor, shape: Shape) -> tl.tensor:
    """Return the keys of tokens: int32 [tokens], from 0.

    Args:
        marks: int32 [tokens, padded group].
        floors: int32 [padded group], of the heads.
        totals: float32 [padded group], of the heads.
        shape: of the layer.
    """
    head = tl.arange(0, shape.padded_group)
    shares = tl.where((head < shape.group)[None, :], counted_weights(marks, floors) / totals[None, :], 0.0)
    mean = tl.sum(shares, 1) * (1.0 / shape.group)
    key = tl.floor(tl.log2(tl.maximum(mean, _SMALLEST)) * _KEY_STEPS).to(tl.int32)
    return tl.minimum(tl.maximum(key, _LOWEST), 0) - _LOWEST


@triton.jit  # type: ignore[untyped-decorator]
def key_kernel(
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    anchors: Anchors,
    window: tl.constexpr,
    again: tl.constexpr,
) -> None:
    """List tokens whose keys may be high, and count these.

    Pairs of which too few were counted are counted ``again``, all their tokens. Grid: programs that share a pair's
    units × rows × KV heads.
    """
    if again:  # noqa: SIM102  # A condition of the launch and one of the batch.
        if tl.load(scratch.any_open + 1) == 0:
            return
    row, kv_head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    pair = row * shape.kv_heads + kv_head
    if again:  # noqa: SIM102  # A condition of the launch and one of the batch.
        if tl.load(scratch.key_open + pair) == 0:
            return
    _, scored, sinks = bounds_of(rows, policies, row, window)
    if scored == 0:
        return
    head = tl.arange(0, shape.padded_group)
    of_heads = pair * shape.padded_group + head
    floors = tl.load(scratch.floors + of_heads)
    totals = tl.load(scratch.totals + of_heads, mask=head < shape.group, other=1.0)
    anchor_ptr = anchors.keys + tl.load(anchors.slots + row) * shape.kv_heads + kv_head
    lowest = tl.maximum(tl.load(anchor_ptr) - _COUNTED_BELOW, 0)
    if again:
        lowest = lowest * 0
    # Where the mean is so high, a head's own share is no lower.
    share = (lowest + _LOWEST).to(tl.float32) * (1.0 / _KEY_STEPS)
    starts = tl.floor((share + tl.log2(totals)) * _STEPS).to(tl.int32) + _UNIT_MARK
    starts = tl.where(lowest > 0, tl.maximum(starts, 1), 0)
    starts = tl.where(head < shape.group, starts, _MARKS)
    histogram_ptr = scratch.key_histograms + pair * _KEYS
    for unit in range(tl.program_id(0), tl.cdiv(scored, _UNIT), tl.num_programs(0)):
        listed = list_candidates(scratch, pair, unit, sinks, scored, starts, shape)
        tl.store(scratch.counts + pair * scratch.units + unit, listed)
        # Other threads' entries are read from here on.
        tl.debug_barrier()
        of_unit = pair * scratch.tokens + unit * _UNIT
        for begin in range(0, listed, _LISTED):
            each = begin + tl.arange(0, _LISTED)
            is_listed = each < listed
            place = tl.load(scratch.local + of_unit + each, mask=is_listed, other=0)
            marks = marks_at(scratch, of_unit + place, is_listed, shape)
            keys = key_of(marks, floors, totals, shape)
            tl.store(scratch.keys + of_unit + each, keys.to(tl.int16), mask=is_listed)
            tl.atomic_add(histogram_ptr + keys, 1, mask=is_listed & (keys >= lowest), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def key_cut_kernel(
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    anchors: Anchors,
    window: tl.constexpr,
    again: tl.constexpr,
) -> None:
    """Find the lowest key that each pair takes. Grid: rows × KV heads.

    A pair of which too few tokens were counted is open: all are counted, and the kernel runs, ``again``.
    """
    if again:  # noqa: SIM102  # A condition of the launch and one of the batch.
        if tl.load(scratch.any_open + 1) == 0:
            return
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = row * shape.kv_heads + kv_head
    length, scored, sinks = bounds_of(rows, policies, row, window)
    is_due = scored > 0
    if again:
        is_due &= tl.load(scratch.key_open + pair) != 0
    if is_due:
        key = tl.arange(0, _KEYS)
        histogram_ptr = scratch.key_histograms + pair * _KEYS + key
        counts = tl.load(histogram_ptr)
        tl.store(histogram_ptr, counts * 0)
        budget = tl.load(policies.budgets + row) - (length - scored + sinks)
        wanted = tl.maximum(tl.minimum(budget, scored - sinks), 0)
        above = tl.cumsum(counts, 0, reverse=True) - counts
        # The lowest key above which the budget is not yet full; beyond all keys if nothing is wanted.
        cut = tl.min(tl.where((above < wanted) & (counts > 0), key, _KEYS), 0)
        tl.store(scratch.key_cuts + pair, cut)
        tl.store(scratch.key_ties + pair, wanted - tl.sum(tl.where(key > cut, counts, 0), 0))
        tl.store(anchors.keys + tl.load(anchors.slots + row) * shape.kv_heads + kv_head, cut)
        if not again:
            is_few = tl.sum(counts, 0) < wanted
            tl.store(scratch.key_open + pair, is_few.to(tl.int32))
            if is_few:
                tl.store(scratch.any_open + 1, 1)
