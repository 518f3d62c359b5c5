"""What a row and KV head need before codes are scored: rounded queries, and the kept tokens' mass."""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.attend.gpu_softmax import soft_capped
from winnow_kernels.attend.gpu_widening import computable
from winnow_kernels.decode.predicted_attention import STEPS
from winnow_kernels.indexes.gpu_key_codes import Codes
from winnow_kernels.indexes.key_codes import QUERY_LEVELS
from winnow_kernels.kernel_arguments import Rows, Vectors
from winnow_kernels.policies.lowbit_top_p.gpu.state import (
    Anchors,
    Policies,
    Scratch,
    Shape,
    bounds_of,
    floor_of,
    kept_positions,
)
from winnow_kernels.selection.gpu_slots import slots_at

_KEPT = tl.constexpr(64)
_CHANNELS = tl.constexpr(64)
_LEVELS = tl.constexpr(float(QUERY_LEVELS))
_STEPS = tl.constexpr(STEPS)
_TINY = tl.constexpr(1.1754943508222875e-38)
_NO_TOP = tl.constexpr(-(2**30))
_HEADS = tl.constexpr(16)


@triton.jit  # type: ignore[untyped-decorator]
def prepare_kernel(
    queries: Vectors,
    keys: Vectors,
    rotation_ptr: tl.tensor,
    rows: Rows,
    policies: Policies,
    codes: Codes,
    shape: Shape,
    scratch: Scratch,
    anchors: Anchors,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    window: tl.constexpr,
    dim_block: tl.constexpr,
) -> None:
    """Grid: rows × KV heads × 2; one program rounds queries, the other scores what is kept."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length, scored, sinks = bounds_of(rows, policies, row, window)
    if (tl.program_id(0) == 0) & (kv_head == 0):
        tl.store(scratch.any_open, 0)
    if scored > 0:
        of_pair = (row * shape.kv_heads + kv_head) * shape.padded_group
        query_ptr = queries.pointer + row * queries.row_stride + kv_head * shape.group * queries.head_stride
        if tl.program_id(2) == 0:
            _round(query_ptr, queries, rotation_ptr, of_pair, codes, shape, scratch, scale_log2, dim_block)
        else:
            head = tl.arange(0, _HEADS)
            dim = tl.arange(0, dim_block)
            is_dim = dim < codes.head_dim
            query = tl.load(
                query_ptr + head[:, None] * queries.head_stride + dim[None, :],
                mask=(head < shape.group)[:, None] & is_dim[None, :],
                other=0.0,
            )
            query = computable(query, keys.pointer.dtype.element_ty)
            highest = tl.full([_HEADS], -float("inf"), tl.float32)
            mass = tl.zeros([_HEADS], tl.float32)
            tokens = length - scored + sinks
            table_ptr = rows.page_table + row * rows.table_stride
            for begin in range(0, tokens, _KEPT):
                place = begin + tl.arange(0, _KEPT)
                is_kept = place < tokens
                position = kept_positions(place, length, scored)
                slot = slots_at(table_ptr, position, is_kept, rows.page_size).to(tl.int64)
                key_ptr = keys.pointer + slot[None, :] * keys.row_stride + kv_head * keys.head_stride + dim[:, None]
                key = tl.load(key_ptr, mask=is_kept[None, :] & is_dim[:, None], other=0.0).to(query.dtype)
                scores = tl.dot(query, key, input_precision="ieee") * scale_log2
                if cap_log2 is not None:
                    scores = soft_capped(scores, cap_log2)
                scores = tl.where(is_kept[None, :], scores, -float("inf"))
                higher = tl.maximum(highest, tl.max(scores, 1))
                mass = mass * tl.exp2(highest - higher) + tl.sum(tl.exp2(scores - higher[:, None]), 1)
                highest = higher
            kept = (highest + tl.log2(mass)) * _STEPS
            is_head = head < shape.padded_group
            tl.store(scratch.kept + of_pair + head, kept, mask=is_head)
            of_request = tl.load(anchors.slots + row) * (shape.kv_heads * shape.group) + kv_head * shape.group + head
            top = tl.load(anchors.tops + of_request, mask=head < shape.group, other=_NO_TOP)
            # The marks reach 31 steps above the last step's highest one, and as many less 32 below it.
            unit = tl.maximum(tl.floor(kept).to(tl.int32), top - 32)
            base = floor_of(unit)
            tl.store(scratch.bases + of_pair + head, base, mask=is_head)
            tl.store(scratch.tops + of_pair + head, tl.full([_HEADS], _NO_TOP, tl.int32), mask=is_head)
            tl.store(scratch.open + of_pair + head, tl.zeros([_HEADS], tl.int32), mask=is_head)


@triton.jit  # type: ignore[untyped-decorator]
def _round(
    query_ptr: tl.tensor,
    queries: Vectors,
    rotation_ptr: tl.tensor,
    of_pair: tl.tensor,
    codes: Codes,
    shape: Shape,
    scratch: Scratch,
    scale_log2: tl.tensor,
    dim_block: tl.constexpr,
) -> None:
    head_dim: tl.constexpr = codes.head_dim
    head = tl.arange(0, _HEADS)
    is_head = head < shape.padded_group
    dim = tl.arange(0, dim_block)
    turned = rotated(query_ptr, queries, rotation_ptr, shape.group, head_dim, dim_block)
    step = tl.div_rn(tl.max(tl.abs(turned), 1), _LEVELS)
    levels = tl.floor(tl.div_rn(turned, tl.maximum(step, _TINY)[:, None]) + 0.5)
    levels_ptr = scratch.levels + of_pair * head_dim + head[:, None] * head_dim + dim[None, :]
    tl.store(levels_ptr, levels.to(tl.int8), mask=is_head[:, None] & (dim < head_dim)[None, :])
    tl.store(scratch.sums + of_pair + head, tl.sum(levels, 1).to(tl.int32), mask=is_head)
    tl.store(scratch.worths + of_pair + head, step * (scale_log2 * _STEPS / head_dim), mask=is_head)


@triton.jit  # type: ignore[untyped-decorator]
def rotated(
    query_ptr: tl.tensor,
    queries: Vectors,
    rotation_ptr: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
) -> tl.tensor:
    """Return a group's queries, rotated as keys are: float32 [16, dim_block], 0 beyond them.

    Args:
        query_ptr: the first one.
        queries: whose heads are strided.
        rotation_ptr: ``KeyCodes.turn``.
        group: how many they are.
        head_dim: numbers of a query.
        dim_block: a power of two that holds them.
    """
    # The matrix units take no fewer rows.
    head = tl.arange(0, _HEADS)
    dim = tl.arange(0, dim_block)
    turned = tl.zeros([_HEADS, dim_block], tl.float32)
    channels: tl.constexpr = min(dim_block, _CHANNELS)
    # Rows of ±1 are the same in all dtypes.
    of_rotation: tl.constexpr = rotation_ptr.dtype.element_ty
    dtype: tl.constexpr = of_rotation if of_rotation == tl.float32 else query_ptr.dtype.element_ty
    for begin in tl.static_range(0, dim_block, channels):
        channel = begin + tl.arange(0, channels)
        is_channel = channel < head_dim
        part = tl.load(
            query_ptr + head[:, None] * queries.head_stride + channel[None, :],
            mask=(head < group)[:, None] & is_channel[None, :],
            other=0.0,
        )
        turn_ptr = rotation_ptr + dim[None, :] * head_dim + channel[:, None]
        turn = tl.load(turn_ptr, mask=is_channel[:, None] & (dim < head_dim)[None, :], other=0.0)
        turned = tl.dot(part.to(dtype), turn.to(dtype), turned, input_precision="ieee")
    return turned
