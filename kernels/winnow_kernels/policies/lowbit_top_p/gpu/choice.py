"""What comes after the marks: counting, cutting, keeping and writing."""

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
    own_part,
)
from winnow_kernels.selection.gpu_meeting import leave, meet

_IS_OPEN = tl.constexpr(IS_OPEN)


@triton.jit  # type: ignore[untyped-decorator]
def count_kernel(
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    anchors: Anchors,
    window: tl.constexpr,
    by_key: tl.constexpr,
    row_block: tl.constexpr,
) -> None:
    """List tokens that may be selected, from where the last steps say, and count them.

    Grid: programs that share a pair's units if all rows act × rows × KV heads.
    """
    row, part, sharing = own_part(policies, row_block)
    kv_head = tl.program_id(2)
    pair = row * shape.kv_heads + kv_head
    _, scored, sinks = bounds_of(rows, policies, row, window)
    if part < tl.minimum(tl.cdiv(scored, shape.unit), sharing):
        turn = scored * 0
        if by_key:
            slot = tl.load(anchors.slots + row)
            count_keys(pair, slot, part, sharing, turn, sinks, scored, shape, scratch, anchors)
        else:
            count_marks(pair, part, sharing, turn, sinks, scored, shape, scratch)


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
    """Find where the selection ends by what was counted.

    Grid: programs that share a pair's query heads × rows × KV heads.
    """
    row, kv_head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    _, scored, _ = bounds_of(rows, policies, row, window)
    if scored > 0:
        part, sharing = tl.program_id(0), tl.num_programs(0)
        _cut(row, kv_head, part, sharing, scored * 0, rows, policies, shape, scratch, anchors, window, by_key)


@triton.jit(do_not_specialize=["at_once"])  # type: ignore[untyped-decorator]
def keep_kernel(
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    anchors: Anchors,
    at_once: tl.tensor,
    window: tl.constexpr,
    by_key: tl.constexpr,
    row_block: tl.constexpr,
) -> None:
    """Leave in the lists what is selected.

    Where the last steps led to a list too short, the pair's programs first list, count and cut once more from further
    down, and meet in between. Grid: as of ``count_kernel``; of a pair there are no more than fit the device at once.
    """
    row, part, sharing = own_part(policies, row_block)
    kv_head = tl.program_id(2)
    pair = row * shape.kv_heads + kv_head
    _, scored, sinks = bounds_of(rows, policies, row, window)
    units = tl.cdiv(scored, shape.unit)
    sharing = tl.minimum(tl.minimum(units, sharing), at_once)
    if part < sharing:
        met_ptr = scratch.met + pair
        arrivals, turn = sharing, sharing * 0
        is_open = _open_of(pair, shape, scratch, by_key)
        if is_open == _IS_OPEN:
            slot = tl.load(anchors.slots + row)
            while is_open == _IS_OPEN:
                turn += 1
                # All have seen that it is open before anyone can change that.
                meet(met_ptr, arrivals)
                if by_key:
                    count_keys(pair, slot, part, sharing, turn, sinks, scored, shape, scratch, anchors)
                else:
                    count_marks(pair, part, sharing, turn, sinks, scored, shape, scratch)
                meet(met_ptr, arrivals + sharing)
                _cut(row, kv_head, part, sharing, turn, rows, policies, shape, scratch, anchors, window, by_key)
                meet(met_ptr, arrivals + 2 * sharing)
                is_open = _open_of(pair, shape, scratch, by_key)
                arrivals += 3 * sharing
            leave(met_ptr, arrivals)
        keep_taken(pair, part, sharing, units, shape, scratch, by_key)


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
    row_block: tl.constexpr,
) -> None:
    """Write what is selected as slots, its counts, and what is believed of the masses.

    Whoever is the last of a pair writes what is kept. Grid: as of ``count_kernel``.
    """
    row, part, sharing = own_part(policies, row_block)
    kv_head = tl.program_id(2)
    pair = row * shape.kv_heads + kv_head
    _, scored, _ = bounds_of(rows, policies, row, window)
    sharing = tl.minimum(tl.cdiv(scored, shape.unit), sharing)
    if part < sharing:
        write_taken(row, pair, part, sharing, rows, policies, shape, scratch, selected, window, by_key, in_order)
        if leave(scratch.met + pair, sharing):
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
def _cut(
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
    by_key: tl.constexpr,
) -> None:
    if by_key:
        if part == 0:
            pair = row * shape.kv_heads + kv_head
            slot = tl.load(anchors.slots + row)
            cut_keys(row, pair, slot, turn, rows, policies, shape, scratch, anchors, window)
    else:
        cut_marks(row, kv_head, part, sharing, turn, rows, policies, shape, scratch, anchors, window)


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
