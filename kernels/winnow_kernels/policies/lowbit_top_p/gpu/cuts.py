"""Where each query head's selection ends, from the counts of its high marks."""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.kernel_arguments import Rows
from winnow_kernels.policies.lowbit_top_p.gpu.state import (
    MARKS,
    Policies,
    Scratch,
    Shape,
    bounds_of,
    weight_of_kept,
    weights_of,
)
from winnow_kernels.policies.lowbit_top_p.parameters import WHOLE_ABOVE

_MARKS = tl.constexpr(MARKS)
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

    A query head of which too few tokens were counted is open: all are counted, and the kernel runs, ``again``.
    """
    if again:  # noqa: SIM102  # A condition of the launch and one of the batch.
        if tl.load(scratch.any_open + 1) == 0:
            return
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length, scored, sinks = bounds_of(rows, policies, row, window)
    if scored == 0:
        return
    pair = row * shape.kv_heads + kv_head
    head = tl.arange(0, shape.padded_group)
    of_heads = pair * shape.padded_group + head
    is_head = head < shape.group
    if again:
        is_head &= tl.load(scratch.open + of_heads) != 0
    marks = tl.arange(0, _MARKS)
    histogram_ptr = scratch.histograms + of_heads[:, None] * _MARKS + marks[None, :]
    counts = tl.load(histogram_ptr)
    tl.store(histogram_ptr, counts * 0)
    total = tl.load(scratch.totals + of_heads)
    counts = tl.where(marks[None, :] > tl.load(scratch.floors + of_heads)[:, None], counts, 0)
    # In float64, in which the order of sums, and so the base, cannot decide where they reach the share.
    masses = counts.to(tl.float64) * weights_of(marks)[None, :].to(tl.float64)
    share = tl.load(policies.shares + row)
    of_kept = weight_of_kept(tl.load(scratch.kept + of_heads), tl.load(scratch.bases + of_heads))
    missing = share * total.to(tl.float64) - of_kept.to(tl.float64)
    # With what is kept, ``least`` tokens; fewer if there are no more.
    least = tl.minimum(tl.load(policies.least + row) - (length - scored + sinks), scored - sinks)
    # From above, so that it makes no difference how far down is counted.
    masses_to = tl.cumsum(masses, 1, reverse=True)
    counts_to = tl.cumsum(counts, 1, reverse=True)
    is_taken = ((masses_to - masses < missing[:, None]) | (counts_to - counts < least)) & (counts > 0)
    cuts = tl.min(tl.where(is_taken, marks[None, :], _MARKS), 1)
    is_few = is_head & ((tl.sum(masses, 1) < missing) | (tl.sum(counts, 1) < least))
    cuts = tl.where(is_few, 0, cuts)
    if share > _WHOLE_ABOVE:
        cuts, is_few = cuts * 0, is_head
    tl.store(scratch.cuts + of_heads, tl.where(head < shape.group, cuts, _MARKS), mask=is_head | (head >= shape.group))
    if not again:
        tl.store(scratch.open + of_heads, is_few.to(tl.int32))
        tl.store(scratch.starts + of_heads, 0, mask=is_few)
        if tl.max(is_few.to(tl.int32), 0) > 0:
            tl.store(scratch.any_open + 1, 1)
