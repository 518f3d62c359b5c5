"""Listing and counting the tokens with high marks."""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.kernel_arguments import Rows
from winnow_kernels.policies.lowbit_top_p.gpu.candidates import list_candidates, marks_at
from winnow_kernels.policies.lowbit_top_p.gpu.state import MARKS, UNIT, Policies, Scratch, Shape, bounds_of

_MARKS = tl.constexpr(MARKS)
_UNIT = tl.constexpr(UNIT)
_LISTED = tl.constexpr(32)


@triton.jit  # type: ignore[untyped-decorator]
def count_kernel(
    rows: Rows, policies: Policies, shape: Shape, scratch: Scratch, window: tl.constexpr, again: tl.constexpr
) -> None:
    """List the tokens of units that have a mark from its head's start on, and count these marks.

    ``again``, with lower starts, for the query heads that are open. Grid: programs that share a pair's units × rows ×
    KV heads.
    """
    if again:  # noqa: SIM102  # A condition of the launch and one of the batch.
        if tl.load(scratch.any_open + 1) == 0:
            return
    row, kv_head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    pair = row * shape.kv_heads + kv_head
    head = tl.arange(0, shape.padded_group)
    of_heads = pair * shape.padded_group + head
    is_counted = head < shape.group
    if again:
        is_counted &= tl.load(scratch.open + of_heads) != 0
        if tl.max(is_counted.to(tl.int32), 0) == 0:
            return
    _, scored, sinks = bounds_of(rows, policies, row, window)
    starts = tl.load(scratch.starts + of_heads, mask=head < shape.group, other=_MARKS)
    for unit in range(tl.program_id(0), tl.cdiv(scored, _UNIT), tl.num_programs(0)):
        count_unit(scratch, pair, unit, sinks, scored, starts, is_counted, shape)


@triton.jit  # type: ignore[untyped-decorator]
def count_unit(
    scratch: Scratch,
    pair: tl.tensor,
    unit: tl.tensor,
    sinks: tl.tensor,
    scored: tl.tensor,
    starts: tl.tensor,
    is_counted: tl.tensor,
    shape: Shape,
) -> None:
    """List a unit's tokens and count their marks.

    Args:
        scratch: with the marks; gets the list and the counts.
        pair: of the unit.
        unit: its number.
        sinks: first tokens, which are not listed.
        scored: tokens, behind which there are none.
        starts: int32 [padded group]; the mark from which on a head's tokens are listed.
        is_counted: bool [padded group]; the heads whose marks are counted.
        shape: of the layer.
    """
    head = tl.arange(0, shape.padded_group)
    # What has the mark 0 is listed at most.
    least = tl.where(is_counted, tl.maximum(starts, 1), _MARKS)
    listed = list_candidates(scratch, pair, unit, sinks, scored, starts, shape)
    tl.store(scratch.counts + pair * scratch.units + unit, listed)
    # Other threads' entries are read from here on.
    tl.debug_barrier()
    histogram_ptr = scratch.histograms + (pair * shape.padded_group + head) * _MARKS
    of_unit = pair * scratch.tokens + unit * _UNIT
    for begin in range(0, listed, _LISTED):
        each = begin + tl.arange(0, _LISTED)
        place = tl.load(scratch.local + of_unit + each, mask=each < listed, other=0)
        marks = marks_at(scratch, of_unit + place, each < listed, shape)
        is_high = marks >= least[None, :]
        tl.atomic_add(histogram_ptr[None, :] + marks, 1, mask=is_high, sem="relaxed")
