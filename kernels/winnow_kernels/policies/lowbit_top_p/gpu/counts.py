"""Listing and counting the tokens with high marks, and where each query head's selection ends by these counts."""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.kernel_arguments import Rows
from winnow_kernels.policies.lowbit_top_p.gpu.candidates import list_candidates, marks_at
from winnow_kernels.policies.lowbit_top_p.gpu.state import (
    IS_OPEN,
    MARKS,
    WAS_OPEN,
    Anchors,
    Policies,
    Scratch,
    Shape,
    bounds_of,
    surest_start,
    weight_of_kept,
    weights_of,
)
from winnow_kernels.policies.lowbit_top_p.parameters import WHOLE_ABOVE

_MARKS = tl.constexpr(MARKS)
_LISTED = tl.constexpr(32)
_IS_OPEN = tl.constexpr(IS_OPEN)
_WAS_OPEN = tl.constexpr(WAS_OPEN)
_WHOLE_ABOVE = tl.constexpr(WHOLE_ABOVE)


@triton.jit  # type: ignore[untyped-decorator]
def count_marks(
    pair: tl.tensor,
    part: tl.tensor,
    sharing: tl.tensor,
    turn: tl.tensor,
    sinks: tl.tensor,
    scored: tl.tensor,
    shape: Shape,
    scratch: Scratch,
) -> None:
    """List the tokens of this program's units that have a mark from its head's start on, and count these marks.

    Args:
        pair: of the units.
        part: the number of this program among those of the pair.
        sharing: programs that share them.
        turn: how often they were counted before; after the first time only the marks of open heads are.
        sinks: first tokens, which are not listed.
        scored: tokens, behind which there are none.
        shape: of the layer.
        scratch: with the marks; gets the lists and the counts.
    """
    head = tl.arange(0, shape.padded_group)
    of_heads = pair * shape.padded_group + head
    is_head = head < shape.group
    starts = tl.load(scratch.starts + of_heads, mask=is_head, other=_MARKS, cache_modifier=".cg")
    is_open = tl.load(scratch.open + of_heads, mask=is_head, other=0, cache_modifier=".cg") == _IS_OPEN
    # What has the mark 0 is listed at most.
    least = tl.where(is_head & ((turn == 0) | is_open), tl.maximum(starts, 1), _MARKS)
    histogram_ptr = scratch.histograms + of_heads * _MARKS
    for unit in range(part, tl.cdiv(scored, shape.unit), sharing):
        listed = list_candidates(scratch, pair, unit, sinks, scored, starts, shape)
        # Other threads' entries are read from here on.
        tl.debug_barrier()
        of_unit = pair * scratch.tokens + unit * shape.unit
        for begin in range(0, listed, _LISTED):
            each = begin + tl.arange(0, _LISTED)
            place = tl.load(scratch.local + of_unit + each, mask=each < listed, other=0)
            marks = marks_at(scratch, of_unit + place, each < listed, shape)
            is_high = marks >= least[None, :]
            tl.atomic_add(histogram_ptr[None, :] + marks, 1, mask=is_high, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def cut_marks(
    row: tl.tensor,
    kv_head: tl.tensor,
    part: tl.tensor,
    sharing: tl.tensor,
    turn: tl.tensor,
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    anchors: Anchors,
    window: tl.constexpr,
) -> None:
    """Find the lowest marks that query heads take; one program for each head, as far as there are as many.

    A head of which too few tokens were counted is open, and gets a lower start.

    Args:
        row: of the batch.
        kv_head: of the row.
        part: the number of this program among those of the pair.
        sharing: programs that share its query heads.
        turn: how often marks were counted before.
        rows: of the batch.
        policies: of the rows.
        shape: of the layer.
        scratch: with the counts, which become 0.
        anchors: of the layer; remember the marks.
        window: newest tokens that are kept.
    """
    pair = row * shape.kv_heads + kv_head
    of_request = (tl.load(anchors.slots + row) * shape.kv_heads + kv_head) * shape.group
    for head in range(part, shape.group, sharing):
        of_head = pair * shape.padded_group + head
        if (turn == 0) | (tl.load(scratch.open + of_head, cache_modifier=".cg") == _IS_OPEN):
            _cut(row, of_head, turn, anchors.cuts + of_request + head, rows, policies, scratch, window)


@triton.jit  # type: ignore[untyped-decorator]
def _cut(
    row: tl.tensor,
    of_head: tl.tensor,
    turn: tl.tensor,
    anchor_ptr: tl.tensor,
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
    total, floor = tl.load(scratch.totals + of_head), tl.load(scratch.floors + of_head)
    counts = tl.where(marks > floor, counts, 0)
    # In float64, in which the order of sums, and so the base, cannot decide where they reach the share.
    masses = counts.to(tl.float64) * weights_of(marks).to(tl.float64)
    share = tl.load(policies.shares + row)
    of_kept = weight_of_kept(tl.load(scratch.kept + of_head), tl.load(scratch.bases + of_head)).to(tl.float64)
    missing = share * total.to(tl.float64) - of_kept
    # With what is kept, ``least`` tokens; fewer if there are no more.
    least = tl.minimum(tl.load(policies.least + row) - (length - scored + sinks), scored - sinks)
    # From above, so that it makes no difference how far down is counted.
    masses_to = tl.cumsum(masses, 0, reverse=True)
    counts_to = tl.cumsum(counts, 0, reverse=True)
    is_taken = ((masses_to - masses < missing) | (counts_to - counts < least)) & (counts > 0)
    counted = tl.sum(counts, 0)
    is_short = (tl.sum(masses, 0) < missing) | (counted < least)
    start = tl.load(scratch.starts + of_head, cache_modifier=".cg")
    cut = tl.min(tl.where(is_taken, marks, _MARKS), 0)
    cut = tl.where(is_short | (share > _WHOLE_ABOVE), 0, cut)
    tl.store(scratch.cuts + of_head, cut)
    # There is nothing below 0.
    is_open = is_short & (start > 0)
    tl.store(scratch.open + of_head, tl.where(is_open, _IS_OPEN, tl.where(turn > 0, _WAS_OPEN, 0)))
    surest = surest_start(share, total, scored - sinks)
    tl.store(scratch.starts + of_head, tl.where((counted < least) | (start <= surest), 0, surest), mask=is_open)
    # A low cut is remembered for a while: of neighbouring steps some need far more tokens than others.
    above, anchor = cut - floor, tl.load(anchor_ptr)
    tl.store(anchor_ptr, tl.where(anchor < 0, above, tl.minimum(above, anchor + 1)), mask=is_open == 0)
