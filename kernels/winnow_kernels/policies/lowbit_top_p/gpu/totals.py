"""What is known of masses as soon as all tokens are scored."""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.decode.predicted_attention import STEPS
from winnow_kernels.kernel_arguments import Rows
from winnow_kernels.policies.lowbit_top_p.gpu.state import (
    MARKS,
    SPAN,
    SPARE,
    UNIT_MARK,
    Anchors,
    Policies,
    Scratch,
    Shape,
    bounds_of,
    floor_of,
    surest_start,
    weight_of_kept,
)

_MARKS = tl.constexpr(MARKS)
_SPAN = tl.constexpr(SPAN)
_SPANS = tl.constexpr(64)
_SPARE = tl.constexpr(SPARE)
_STEPS = tl.constexpr(float(STEPS))
_UNIT_MARK = tl.constexpr(UNIT_MARK)


@triton.jit  # type: ignore[untyped-decorator]
def total_kernel(
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    anchors: Anchors,
    window: tl.constexpr,
    by_key: tl.constexpr,
    again: tl.constexpr,
) -> None:
    """Add up the masses of spans, and say from which marks on tokens are to be counted, unless ``by_key``.

    Query heads whose marks do not reach are left open, with other bases: they are marked, and this is done, ``again``.
    Grid: rows × KV heads.
    """
    if again:  # noqa: SIM102  # A condition of the launch and one of the batch.
        if tl.load(scratch.any_open) == 0:
            return
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = row * shape.kv_heads + kv_head
    head = tl.arange(0, shape.padded_group)
    of_heads = pair * shape.padded_group + head
    _, scored, sinks = bounds_of(rows, policies, row, window)
    is_due = (head < shape.group) & (scored > 0)
    if again:
        is_due &= tl.load(scratch.open + of_heads) != 0
    if tl.max(is_due.to(tl.int32), 0) > 0:
        kept, bases = tl.load(scratch.kept + of_heads), tl.load(scratch.bases + of_heads)
        tops = tl.load(scratch.tops + of_heads)
        column = tl.arange(0, shape.columns)
        others = tl.zeros([shape.columns], tl.float64)
        spans = tl.cdiv(scored, _SPAN)
        for begin in range(0, spans, _SPANS):
            each = begin + tl.arange(0, _SPANS)
            masses_ptr = scratch.masses + (pair * scratch.spans + each)[:, None] * shape.columns + column[None, :]
            masses = tl.load(masses_ptr, mask=(each < spans)[:, None], other=0.0)
            others += tl.sum(masses.to(tl.float64), 0)
        # Several tokens share a row of columns.
        others = tl.sum(tl.reshape(others, [shape.columns // shape.padded_group, shape.padded_group]), 0)
        total = (weight_of_kept(kept, bases) + others).to(tl.float32)
        steps = tl.log2(total) * _STEPS
        tl.store(scratch.totals + of_heads, total)
        # The lowest step that counts holds 2^-24 of the mass.
        floors = tl.ceil(steps).to(tl.int32) - 1
        tl.store(scratch.floors + of_heads, floors)
        of_request = (tl.load(anchors.slots + row) * shape.kv_heads + kv_head) * shape.group + head
        if not by_key:
            share = tl.load(policies.shares + row)
            # Unknown, it is far below all.
            expected = floors + tl.load(anchors.cuts + of_request, mask=head < shape.group, other=0) - _SPARE
            surest = surest_start(share, total, scored - sinks)
            # What takes everything lists everything, whatever another request's steps took.
            start = tl.where(surest > 0, tl.maximum(expected, surest), 0)
            # The highest is counted in any case.
            tl.store(scratch.starts + of_heads, tl.minimum(start, tl.maximum(tops - bases, 1)), mask=is_due)
        tl.store(anchors.tops + of_request, tops, mask=is_due)
        if again:
            tl.store(scratch.open + of_heads, tl.zeros([shape.padded_group], tl.int32))
        else:
            unit = tl.maximum(tl.floor(kept).to(tl.int32), tops)
            is_open = is_due & ((unit - _UNIT_MARK <= bases) | (tops - bases >= _MARKS - 1))
            tl.store(scratch.open + of_heads, is_open.to(tl.int32))
            tl.store(scratch.bases + of_heads, floor_of(unit), mask=is_open)
            if tl.max(is_open.to(tl.int32), 0) > 0:
                tl.store(scratch.any_open, 1)
