"""Where each query head's selection ends, from the counts of its high marks."""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.kernel_arguments import Rows
from winnow_kernels.policies.lowbit_top_p.gpu.counts import count_unit
from winnow_kernels.policies.lowbit_top_p.gpu.state import (
    MARKS,
    SPARE,
    UNIT,
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
_UNIT = tl.constexpr(UNIT)
_WHOLE_ABOVE = tl.constexpr(WHOLE_ABOVE)


@triton.jit  # type: ignore[untyped-decorator]
def cut_kernel(
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    window: tl.constexpr,
    again: tl.constexpr,
) -> None:
    """Find the lowest mark that each query head takes. Grid: rows × KV heads.

    A query head of which too few tokens were counted is open: more are counted, and the kernel runs, ``again``. If they
    are too few once more, it counts all of them itself.
    """
    if again:  # noqa: SIM102  # A condition of the launch and one of the batch.
        if tl.load(scratch.any_open + 1) == 0:
            return
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, scored, sinks = bounds_of(rows, policies, row, window)
    if scored == 0:
        return
    pair = row * shape.kv_heads + kv_head
    head = tl.arange(0, shape.padded_group)
    of_heads = pair * shape.padded_group + head
    is_head = head < shape.group
    if again:
        is_head &= tl.load(scratch.open + of_heads) != 0
    is_few = _cut(row, pair, is_head, rows, policies, shape, scratch, window, again)
    if again:
        starts = tl.load(scratch.starts + of_heads, mask=head < shape.group, other=_MARKS)
        is_few &= starts > 0
        if tl.max(is_few.to(tl.int32), 0) > 0:
            starts = tl.where(is_few, 0, starts)
            for unit in range(tl.cdiv(scored, _UNIT)):
                count_unit(scratch, pair, unit, sinks, scored, starts, is_few, shape)
            # What all threads have added is read from here on.
            tl.debug_barrier()
            _cut(row, pair, is_few, rows, policies, shape, scratch, window, again)
    else:
        tl.store(scratch.open + of_heads, is_few.to(tl.int32))
        if tl.max(is_few.to(tl.int32), 0) > 0:
            tl.store(scratch.any_open + 1, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _cut(
    row: tl.tensor,
    pair: tl.tensor,
    is_due: tl.tensor,
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    window: tl.constexpr,
    again: tl.constexpr,
) -> tl.tensor:
    """Write the cuts of heads that are due, and return of which too few were counted: bool [padded group].

    The first time these get a lower start.
    """
    length, scored, sinks = bounds_of(rows, policies, row, window)
    head = tl.arange(0, shape.padded_group)
    of_heads = pair * shape.padded_group + head
    marks = tl.arange(0, _MARKS)
    histogram_ptr = scratch.histograms + of_heads[:, None] * _MARKS + marks[None, :]
    counts = tl.load(histogram_ptr, cache_modifier=".cg")
    tl.store(histogram_ptr, counts * 0)
    total = tl.load(scratch.totals + of_heads).to(tl.float64)
    counts = tl.where(marks[None, :] > tl.load(scratch.floors + of_heads)[:, None], counts, 0)
    # In float64, in which the order of sums, and so the base, cannot decide where they reach the share.
    masses = counts.to(tl.float64) * weights_of(marks)[None, :].to(tl.float64)
    share = tl.load(policies.shares + row)
    of_kept = weight_of_kept(tl.load(scratch.kept + of_heads), tl.load(scratch.bases + of_heads)).to(tl.float64)
    missing = share * total - of_kept
    # With what is kept, ``least`` tokens; fewer if there are no more.
    least = tl.minimum(tl.load(policies.least + row) - (length - scored + sinks), scored - sinks)
    # From above, so that it makes no difference how far down is counted.
    masses_to = tl.cumsum(masses, 1, reverse=True)
    counts_to = tl.cumsum(counts, 1, reverse=True)
    is_taken = ((masses_to - masses < missing[:, None]) | (counts_to - counts < least)) & (counts > 0)
    cuts = tl.min(tl.where(is_taken, marks[None, :], _MARKS), 1)
    counted, of_counted = tl.sum(counts, 1), tl.sum(masses, 1)
    is_few = is_due & ((of_counted < missing) | (counted < least))
    cuts = tl.where(is_few, 0, cuts)
    if share > _WHOLE_ABOVE:
        cuts, is_few = cuts * 0, is_due
    tl.store(scratch.cuts + of_heads, tl.where(head < shape.group, cuts, _MARKS), mask=is_due | (head >= shape.group))
    if not again:
        samples_ptr = scratch.samples + of_heads[:, None] * _MARKS + marks[None, :]
        samples = tl.load(samples_ptr)
        tl.store(samples_ptr, samples * 0)
        if tl.max(is_few.to(tl.int32), 0) > 0:
            # Of what is not counted, which part must be taken.
            part = (missing - of_counted) / tl.maximum(total - of_kept - of_counted, 1e-30)
            lower = _lower_start(samples, part, tl.load(scratch.starts + of_heads))
            lower = tl.where(counted < least, 0, lower)
            if share > _WHOLE_ABOVE:
                lower = lower * 0
            tl.store(scratch.starts + of_heads, lower, mask=is_few)
    return is_few


@triton.jit  # type: ignore[untyped-decorator]
def _lower_start(samples: tl.tensor, part: tl.tensor, starts: tl.tensor) -> tl.tensor:
    """Return the marks from which on there is a ``part`` of the mass below the starts, by the sample.

    What made the starts too high, few heavy tokens that the sample missed, is counted by now.
    """
    marks = tl.arange(0, _MARKS)
    masses = samples * weights_of(marks)[None, :]
    below = tl.sum(tl.where(marks[None, :] < starts[:, None], masses, 0.0), 1)
    left = below * (1.0 - tl.minimum(tl.maximum(part, 0.0), 1.0)).to(tl.float32)
    lower = tl.sum((tl.cumsum(masses, 1) <= left[:, None]).to(tl.int32), 1)
    return tl.maximum(tl.minimum(lower, starts) - _SPARE, 0)
