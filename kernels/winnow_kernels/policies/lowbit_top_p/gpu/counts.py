"""Listing and counting the tokens with high marks, and where each query head's selection ends by these counts."""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.kernel_arguments import Rows
from winnow_kernels.policies.lowbit_top_p.gpu.candidates import count_words, least_counted, list_candidates, words_of
from winnow_kernels.policies.lowbit_top_p.gpu.state import (
    IS_OPEN,
    MARKS,
    SPARE,
    WAS_OPEN,
    Policies,
    Scratch,
    Shape,
    bounds_of,
    weight_of_kept,
    weights_of,
)
from winnow_kernels.policies.lowbit_top_p.parameters import WHOLE_ABOVE

_MARKS = tl.constexpr(MARKS)
_SPARE = tl.constexpr(SPARE)
_IS_OPEN = tl.constexpr(IS_OPEN)
_WAS_OPEN = tl.constexpr(WAS_OPEN)
_WHOLE_ABOVE = tl.constexpr(WHOLE_ABOVE)


@triton.jit  # type: ignore[untyped-decorator]
def count_marks(
    pair: tl.tensor,
    sharing: tl.tensor,
    sinks: tl.tensor,
    scored: tl.tensor,
    shape: Shape,
    scratch: Scratch,
) -> None:
    """List the tokens of this program's units that have a mark from its head's start on, and count heads' marks.

    Args:
        pair: of the units.
        sharing: programs that share them.
        sinks: first tokens, which are not listed.
        scored: tokens, behind which there are none.
        shape: of the layer.
        scratch: with the marks; gets the lists and the counts.
    """
    head = tl.arange(0, shape.padded_group)
    of_heads = pair * shape.padded_group + head
    starts = tl.load(scratch.starts + of_heads, mask=head < shape.group, other=_MARKS, cache_modifier=".cg")
    least = least_counted(scratch, pair, shape)
    units = tl.cdiv(scored, shape.unit)
    for unit in range(tl.program_id(0), units, sharing):
        words = words_of(scratch, pair, unit, True, shape)
        list_candidates(scratch, pair, unit, words, sinks, scored, starts, shape)
        count_words(
            scratch.histograms + pair * shape.padded_group * _MARKS,
            unit,
            words,
            least,
            sinks,
            scored,
            shape,
        )


@triton.jit  # type: ignore[untyped-decorator]
def cut_marks(
    row: tl.tensor,
    pair: tl.tensor,
    sharing: tl.tensor,
    turn: tl.tensor,
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    window: tl.constexpr,
) -> None:
    """Find the lowest marks that query heads take; one program for each head, as far as there are as many.

    A head of which too few tokens were counted is open, and gets a lower start; the second time, one from which on
    everything is counted.

    Args:
        row: of the batch.
        pair: of the heads.
        sharing: programs that share them.
        turn: how often they were counted before.
        rows: of the batch.
        policies: of the rows.
        shape: of the layer.
        scratch: with the counts, which become 0.
        window: newest tokens that are kept.
    """
    for head in range(tl.program_id(0), shape.group, sharing):
        of_head = pair * shape.padded_group + head
        if (turn == 0) | (tl.load(scratch.open + of_head, cache_modifier=".cg") == _IS_OPEN):
            _cut(row, of_head, turn, rows, policies, scratch, window)


@triton.jit  # type: ignore[untyped-decorator]
def _cut(
    row: tl.tensor,
    of_head: tl.tensor,
    turn: tl.tensor,
    rows: Rows,
    policies: Policies,
    scratch: Scratch,
    window: tl.constexpr,
) -> None:
    length, scored, sinks = bounds_of(rows, policies, row, window)
    marks = tl.arange(0, _MARKS)
    histogram_ptr = scratch.histograms + of_head * _MARKS + marks
    counts = tl.load(histogram_ptr, cache_modifier=".cg")
    tl.store(histogram_ptr, tl.zeros([_MARKS], tl.int32))
    total = tl.load(scratch.totals + of_head).to(tl.float64)
    counts = tl.where(marks > tl.load(scratch.floors + of_head), counts, 0)
    # In float64, in which the order of sums, and so the base, cannot decide where they reach the share.
    masses = counts.to(tl.float64) * weights_of(marks).to(tl.float64)
    share = tl.load(policies.shares + row)
    of_kept = weight_of_kept(tl.load(scratch.kept + of_head), tl.load(scratch.bases + of_head)).to(tl.float64)
    missing = share * total - of_kept
    # With what is kept, ``least`` tokens; fewer if there are no more.
    least = tl.minimum(tl.load(policies.least + row) - (length - scored + sinks), scored - sinks)
    # From above, so that it makes no difference how far down is counted.
    masses_to = tl.cumsum(masses, 0, reverse=True)
    counts_to = tl.cumsum(counts, 0, reverse=True)
    is_taken = ((masses_to - masses < missing) | (counts_to - counts < least)) & (counts > 0)
    cut = tl.min(tl.where(is_taken, marks, _MARKS), 0)
    counted, of_counted = tl.sum(counts, 0), tl.sum(masses, 0)
    start = tl.load(scratch.starts + of_head, cache_modifier=".cg")
    is_short = (of_counted < missing) | (counted < least)
    # There is nothing below 0.
    is_open = is_short & (start > 0)
    cut = tl.where(is_short | (share > _WHOLE_ABOVE), 0, cut)
    tl.store(scratch.cuts + of_head, cut)
    tl.store(scratch.open + of_head, tl.where(is_open, _IS_OPEN, tl.where(turn > 0, _WAS_OPEN, 0)))
    samples_ptr = scratch.samples + of_head * _MARKS + marks
    counted_from = start * 0 + _MARKS
    if is_open:
        if turn == 0:
            # Of what is not counted, which part must be taken.
            part = (missing - of_counted) / tl.maximum(total - of_kept - of_counted, 1e-30)
            start = tl.where(counted < least, 0, _lower_start(tl.load(samples_ptr), part, start))
        else:
            start = start * 0
        tl.store(scratch.starts + of_head, start)
        counted_from = tl.maximum(start, 1)
    tl.store(scratch.counted_from + of_head, counted_from)
    tl.store(samples_ptr, tl.zeros([_MARKS], tl.int32))


@triton.jit  # type: ignore[untyped-decorator]
def _lower_start(sample: tl.tensor, part: tl.tensor, start: tl.tensor) -> tl.tensor:
    """Return the mark from which on there is a ``part`` of the mass below the start, by a head's sample.

    What made the start too high, few heavy tokens that the sample missed, is counted by now.
    """
    marks = tl.arange(0, _MARKS)
    masses = sample * weights_of(marks)
    below = tl.sum(tl.where(marks < start, masses, 0.0), 0)
    left = below * (1.0 - tl.minimum(tl.maximum(part, 0.0), 1.0)).to(tl.float32)
    lower = tl.sum((tl.cumsum(masses, 0) <= left).to(tl.int32), 0)
    return tl.maximum(tl.minimum(lower, start) - _SPARE, 0)
