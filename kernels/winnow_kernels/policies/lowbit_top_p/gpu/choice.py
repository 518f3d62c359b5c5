"""What comes after the marks: cutting and writing. The programs of a pair meet, as often as one needs all others."""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.kernel_arguments import Counts, Rows, Selected
from winnow_kernels.policies.lowbit_top_p.gpu.counts import count_marks, cut_marks
from winnow_kernels.policies.lowbit_top_p.gpu.keys import count_keys, cut_keys
from winnow_kernels.policies.lowbit_top_p.gpu.slots import keep_taken, write_kept, write_taken
from winnow_kernels.policies.lowbit_top_p.gpu.state import (
    IS_OPEN,
    Anchors,
    Policies,
    Scratch,
    Shape,
    bounds_of,
)
from winnow_kernels.selection.gpu_meeting import leave, meet

_IS_OPEN = tl.constexpr(IS_OPEN)


@triton.jit  # type: ignore[untyped-decorator]
def cut_kernel(
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    anchors: Anchors,
    window: tl.constexpr,
    by_key: tl.constexpr,
) -> None:
    """List tokens that may be selected, count them, and find where the selection ends.

    They are listed from where the last steps say; where that was too high, once more from further down. Grid: programs
    that share a pair's units × rows × KV heads; a pair's must fit the device at once.
    """
    row, kv_head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    pair = row * shape.kv_heads + kv_head
    _, scored, sinks = bounds_of(rows, policies, row, window)
    sharing = tl.minimum(tl.cdiv(scored, shape.unit), tl.num_programs(0))
    if tl.program_id(0) < sharing:
        slot = tl.load(anchors.slots + row)
        met_ptr = scratch.met + pair
        arrivals, turn, is_open = sharing, sharing * 0, sharing * 0 + _IS_OPEN
        while is_open == _IS_OPEN:
            if by_key:
                count_keys(pair, slot, sharing, turn, sinks, scored, shape, scratch, anchors)
            else:
                count_marks(pair, sharing, turn, sinks, scored, shape, scratch)
            meet(met_ptr, arrivals)
            if by_key:
                if tl.program_id(0) == 0:
                    cut_keys(row, pair, slot, turn, rows, policies, shape, scratch, anchors, window)
            else:
                cut_marks(row, kv_head, sharing, turn, rows, policies, shape, scratch, anchors, window)
            meet(met_ptr, arrivals + sharing)
            is_open = _open_of(pair, shape, scratch, by_key)
            arrivals += 2 * sharing
            turn += 1
        leave(met_ptr, arrivals)


@triton.jit  # type: ignore[untyped-decorator]
def write_kernel(
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
    """Write what is selected as slots, its counts, and what is believed of the masses.

    Whoever is the last of a pair writes what is kept. Grid: as of ``cut_kernel``.
    """
    row, kv_head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    pair = row * shape.kv_heads + kv_head
    _, scored, _ = bounds_of(rows, policies, row, window)
    units = tl.cdiv(scored, shape.unit)
    sharing = tl.minimum(units, tl.num_programs(0))
    if tl.program_id(0) < sharing:
        met_ptr = scratch.met + pair
        keep_taken(pair, sharing, units, shape, scratch, by_key)
        meet(met_ptr, sharing)
        write_taken(row, pair, sharing, rows, policies, shape, scratch, selected, window, by_key, in_order)
        if leave(met_ptr, 2 * sharing):
            write_kept(
                row,
                kv_head,
                rows,
                policies,
                shape,
                scratch,
                selected,
                read,
                beliefs_ptr,
                key_bytes,
                code_bytes,
                window,
                by_key,
                in_order,
            )


@triton.jit  # type: ignore[untyped-decorator]
def _open_of(pair: tl.tensor, shape: Shape, scratch: Scratch, by_key: tl.constexpr) -> tl.tensor:
    """Return ``IS_OPEN`` where anything of a pair is not settled yet: int32."""
    if by_key:
        is_open = tl.load(scratch.key_open + pair, cache_modifier=".cg") == _IS_OPEN
    else:
        head = tl.arange(0, shape.padded_group)
        open_ptr = scratch.open + pair * shape.padded_group + head
        states = tl.load(open_ptr, mask=head < shape.group, other=0, cache_modifier=".cg")
        is_open = tl.max((states == _IS_OPEN).to(tl.int32), 0) > 0
    return tl.where(is_open, _IS_OPEN, 0)
