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
    IS_OPEN,
    KEYS,
    MARKS,
    UNIT_MARK,
    WAS_OPEN,
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
_UNIT_MARK = tl.constexpr(UNIT_MARK)
_LISTED = tl.constexpr(64)
# Two octaves below the last step's lowest key, and four more each time that these are too few.
_COUNTED_BELOW = tl.constexpr(2 * KEY_STEPS)
_LESS_EACH_TURN = tl.constexpr(4 * KEY_STEPS)
_KEYS_AT_A_TIME = tl.constexpr(256)
_IS_OPEN = tl.constexpr(IS_OPEN)
_WAS_OPEN = tl.constexpr(WAS_OPEN)


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
def count_keys(
    pair: tl.tensor,
    slot: tl.tensor,
    part: tl.tensor,
    sharing: tl.tensor,
    turn: tl.tensor,
    sinks: tl.tensor,
    scored: tl.tensor,
    shape: Shape,
    scratch: Scratch,
    anchors: Anchors,
) -> None:
    """List the tokens of this program's units whose keys may be high, and count these keys.

    Args:
        pair: of the units.
        slot: of the request.
        part: the number of this program among those of the pair.
        sharing: programs that share the units.
        turn: how often they were counted before: each time fewer tokens are left out.
        sinks: first tokens, which are not listed.
        scored: tokens, behind which there are none.
        shape: of the layer.
        scratch: with the marks; gets the lists, the keys and the counts.
        anchors: of the layer.
    """
    head = tl.arange(0, shape.padded_group)
    of_heads = pair * shape.padded_group + head
    floors = tl.load(scratch.floors + of_heads)
    totals = tl.load(scratch.totals + of_heads, mask=head < shape.group, other=1.0)
    lowest = _lowest_counted(slot, turn, shape, anchors)
    # Where the mean is so high, a head's own share is no lower.
    share = (lowest + _LOWEST).to(tl.float32) * (1.0 / _KEY_STEPS)
    starts = tl.floor((share + tl.log2(totals)) * _STEPS).to(tl.int32) + _UNIT_MARK
    starts = tl.where(lowest > 0, tl.maximum(starts, 1), 0)
    starts = tl.where(head < shape.group, starts, _MARKS)
    histogram_ptr = scratch.key_histograms + pair * _KEYS
    for unit in range(part, tl.cdiv(scored, shape.unit), sharing):
        listed = list_candidates(scratch, pair, unit, sinks, scored, starts, shape)
        # Other threads' entries are read from here on.
        tl.debug_barrier()
        of_unit = pair * scratch.tokens + unit * shape.unit
        for begin in range(0, listed, _LISTED):
            each = begin + tl.arange(0, _LISTED)
            is_listed = each < listed
            place = tl.load(scratch.local + of_unit + each, mask=is_listed, other=0)
            marks = marks_at(scratch, of_unit + place, is_listed, shape)
            keys = key_of(marks, floors, totals, shape)
            tl.store(scratch.keys + of_unit + each, keys.to(tl.int16), mask=is_listed)
            tl.atomic_add(histogram_ptr + keys, 1, mask=is_listed & (keys >= lowest), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def cut_keys(
    row: tl.tensor,
    pair: tl.tensor,
    slot: tl.tensor,
    turn: tl.tensor,
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    anchors: Anchors,
    window: tl.constexpr,
) -> None:
    """Find the lowest key that a pair takes, or leave it open where too few tokens were counted.

    Args:
        row: of the batch.
        pair: of the row.
        slot: of the request.
        turn: how often its keys were counted before.
        rows: of the batch.
        policies: of the rows.
        shape: of the layer.
        scratch: with the counts, which become 0.
        anchors: of the layer; remember the key.
        window: newest tokens that are kept.
    """
    length, scored, sinks = bounds_of(rows, policies, row, window)
    budget = tl.load(policies.budgets + row) - (length - scored + sinks)
    wanted = tl.maximum(tl.minimum(budget, scored - sinks), 0)
    lowest = _lowest_counted(slot, turn, shape, anchors)
    # The lowest key above which the budget is not yet full; beyond all keys if nothing is wanted.
    cut = wanted * 0 + _KEYS
    above, spare = wanted * 0, wanted
    key = tl.arange(0, _KEYS_AT_A_TIME)
    histogram_ptr = scratch.key_histograms + pair * _KEYS + key
    for part in tl.static_range(_KEYS // _KEYS_AT_A_TIME):
        first = _KEYS - (part + 1) * _KEYS_AT_A_TIME
        counts = tl.load(histogram_ptr + first, cache_modifier=".cg")
        higher = above + tl.cumsum(counts, 0, reverse=True) - counts
        is_taken = (higher < wanted) & (counts > 0)
        cut = tl.minimum(cut, tl.min(tl.where(is_taken, first + key, _KEYS), 0))
        spare = tl.minimum(spare, tl.min(tl.where(is_taken, wanted - higher, wanted), 0))
        above += tl.sum(counts, 0)
    for part in tl.static_range(_KEYS // _KEYS_AT_A_TIME):
        tl.store(histogram_ptr + part * _KEYS_AT_A_TIME, tl.zeros([_KEYS_AT_A_TIME], tl.int32))
    is_open = (above < wanted) & (lowest > 0)
    tl.store(scratch.key_cuts + pair, cut)
    # Of those with this key, so many are taken.
    tl.store(scratch.key_ties + pair, spare)
    tl.store(scratch.key_open + pair, tl.where(is_open, _IS_OPEN, tl.where(turn > 0, _WAS_OPEN, 0)))
    tl.store(anchors.keys + slot * shape.kv_heads + tl.program_id(2), cut, mask=above >= wanted)


@triton.jit  # type: ignore[untyped-decorator]
def _lowest_counted(slot: tl.tensor, turn: tl.tensor, shape: Shape, anchors: Anchors) -> tl.tensor:
    """Return from which key on tokens are counted, by the last step's lowest one; 0 for all."""
    lowest = tl.load(anchors.keys + slot * shape.kv_heads + tl.program_id(2))
    return tl.maximum(lowest - _COUNTED_BELOW - turn * _LESS_EACH_TURN, 0)
