"""Building the indexes of pages: bounds of a page's keys (Quest) and reciprocal norms of keys (QUOKA).

A page's keys of all KV heads lie in one block of memory. A program reads such a block, or a part of it, once, and one
launch serves all layers: what it costs is reading the keys, half of the KV cache. A model of the shape of Llama-3.1-8B
has 64 KiB of keys a token: 2.1 GB at 32K tokens, 8.6 GB at 128K, 0.6 and 2.6 ms at an H100's 3.35 TB/s.

At decode a page is complete before its entry is needed: as long as it is the newest page, selectors keep it unscored.
So its entry is built at the start of the step in which the next page begins. That is one launch a step for all layers,
whose programs end at once for rows whose newest token begins no page.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import DecodeBatch
from winnow_kernels.indexes.gpu_key_pools import KeyPools, layer_keys

_COLUMNS: Final = 1024
"""Numbers of a slot that a program reads at most: eight heads of 128."""
_ROWS: Final = tl.constexpr(16)
"""Slots that it reads at a time, if a page has as many."""
_SMALLEST: Final = tl.constexpr(torch.finfo(torch.float32).tiny)
_KEYS: Final = 64
"""Keys that a program computes the norms of."""


def build_bounds(pools: KeyPools, pages: Tensor, bounds: Tensor, page_size: int) -> None:
    """Write the bounds of ``pages`` in all layers.

    Args:
        pools: every layer's keys.
        pages: integers [n].
        bounds: [layers, pages of the pool, KV heads, 2 × head dim], contiguous, of the keys' dtype; a page's maxima,
            then its minima.
        page_size: tokens in a page.
    """
    columns, blocks = _column_blocks(pools)
    _bounds_kernel[(len(pages), pools.layers, blocks)](
        pools.addresses,
        pools.first,
        pages,
        bounds,
        bounds.stride(0),
        *pools.strides,
        kv_heads=pools.kv_heads,
        head_dim=pools.head_dim,
        page_size=page_size,
        columns=columns,
    )


def extend_bounds(
    pools: KeyPools, batch: DecodeBatch, active: Tensor, bounds: Tensor, built: Tensor, generations: Tensor
) -> None:
    """Write the bounds of the pages behind which the newest tokens of ``active`` rows begin a page, in all layers.

    Args:
        pools: every layer's keys.
        batch: the step's rows.
        active: int32 [rows]; 0 where nothing shall be done.
        bounds: as in ``build_bounds``.
        built: int64 [pages of the pool]; gets the generations of the pages.
        generations: int64 [pages of the pool].
    """
    columns, blocks = _column_blocks(pools)
    _extend_bounds_kernel[(batch.rows, pools.layers, blocks)](
        pools.addresses,
        pools.first,
        batch.page_table,
        batch.lengths,
        active,
        bounds,
        built,
        generations,
        batch.page_table.stride(0),
        bounds.stride(0),
        *pools.strides,
        kv_heads=pools.kv_heads,
        head_dim=pools.head_dim,
        page_size=batch.page_size,
        columns=columns,
    )


def build_norms(pools: KeyPools, pages: Tensor, reciprocals: Tensor, page_size: int) -> None:
    """Write the reciprocal norms of the keys in ``pages``, in all layers.

    Args:
        pools: every layer's keys.
        pages: integers [n].
        reciprocals: float32 [layers, slots, KV heads], contiguous.
        page_size: tokens in a page.
    """
    _norms_kernel[(len(pages), pools.layers, triton.cdiv(page_size * pools.kv_heads, _KEYS))](
        pools.addresses,
        pools.first,
        pages,
        reciprocals,
        reciprocals.stride(0),
        *pools.strides,
        kv_heads=pools.kv_heads,
        head_dim=pools.head_dim,
        page_size=page_size,
        keys=_KEYS,
        block_dim=triton.next_power_of_2(pools.head_dim),
    )


def extend_norms(
    pools: KeyPools, batch: DecodeBatch, active: Tensor, reciprocals: Tensor, built: Tensor, generations: Tensor
) -> None:
    """Write the reciprocal norms of the pages behind which the newest tokens of ``active`` rows begin a page.

    Args:
        pools: every layer's keys.
        batch: the step's rows.
        active: int32 [rows]; 0 where nothing shall be done.
        reciprocals: as in ``build_norms``.
        built: int64 [pages of the pool]; gets the generations of the pages.
        generations: int64 [pages of the pool].
    """
    _extend_norms_kernel[(batch.rows, pools.layers, triton.cdiv(batch.page_size * pools.kv_heads, _KEYS))](
        pools.addresses,
        pools.first,
        batch.page_table,
        batch.lengths,
        active,
        reciprocals,
        built,
        generations,
        batch.page_table.stride(0),
        reciprocals.stride(0),
        *pools.strides,
        kv_heads=pools.kv_heads,
        head_dim=pools.head_dim,
        page_size=batch.page_size,
        keys=_KEYS,
        block_dim=triton.next_power_of_2(pools.head_dim),
    )


def _column_blocks(pools: KeyPools) -> tuple[int, int]:
    """Return how many numbers of a slot a program reads, a power of two, and how many programs a slot needs."""
    numbers = pools.kv_heads * pools.head_dim
    columns = min(_COLUMNS, triton.next_power_of_2(numbers))
    return columns, triton.cdiv(numbers, columns)


@triton.jit  # type: ignore[untyped-decorator]
def _completed_page(
    table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    active_ptr: tl.tensor,
    row: tl.tensor,
    table_stride: tl.tensor,
    page_size: tl.constexpr,
) -> tl.tensor:
    """Return the page before the one that the row's newest token begins; -1 if it begins none, or the first."""
    earlier = tl.load(lengths_ptr + row) - 1
    begins = (tl.load(active_ptr + row) != 0) & (earlier > 0) & (earlier % page_size == 0)
    place = row.to(tl.int64) * table_stride + earlier // page_size - 1
    return tl.load(table_ptr + place, mask=begins, other=-1)


@triton.jit  # type: ignore[untyped-decorator]
def _note_built(built_ptr: tl.tensor, generations_ptr: tl.tensor, page: tl.tensor) -> None:
    """Let the launch's first program of a page say that its entry holds: later launches see all of its programs."""
    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(built_ptr + page, tl.load(generations_ptr + page))


@triton.jit  # type: ignore[untyped-decorator]
def _write_bounds(
    addresses_ptr: tl.tensor,
    first_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    page: tl.tensor,
    layer_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    layer = tl.program_id(1)
    column = tl.program_id(2) * columns + tl.arange(0, columns)
    inside = column < kv_heads * head_dim
    head, dim = column // head_dim, column % head_dim
    page = page.to(tl.int64)
    keys_ptr = layer_keys(addresses_ptr, first_ptr, layer) + page * page_size * slot_stride
    keys_ptr += (head * head_stride + dim)[None, :]
    greatest = tl.full([columns], float("-inf"), tl.float32)
    least = tl.full([columns], float("inf"), tl.float32)
    rows: tl.constexpr = page_size if page_size < _ROWS else _ROWS
    for start in range(0, page_size, rows):
        slots = start + tl.arange(0, rows)
        keys = tl.load(keys_ptr + slots[:, None] * slot_stride, mask=inside[None, :], other=0.0).to(tl.float32)
        greatest = tl.maximum(greatest, tl.max(keys, 0))
        least = tl.minimum(least, tl.min(keys, 0))
    bounds_ptr += layer.to(tl.int64) * layer_stride + (page * kv_heads + head) * (2 * head_dim) + dim
    tl.store(bounds_ptr, greatest.to(first_ptr.dtype.element_ty), mask=inside)
    tl.store(bounds_ptr + head_dim, least.to(first_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _bounds_kernel(
    addresses_ptr: tl.tensor,
    first_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    layer_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    page = tl.load(pages_ptr + tl.program_id(0))
    _write_bounds(
        addresses_ptr,
        first_ptr,
        bounds_ptr,
        page,
        layer_stride,
        slot_stride,
        head_stride,
        kv_heads,
        head_dim,
        page_size,
        columns,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _extend_bounds_kernel(
    addresses_ptr: tl.tensor,
    first_ptr: tl.tensor,
    table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    active_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    built_ptr: tl.tensor,
    generations_ptr: tl.tensor,
    table_stride: tl.tensor,
    layer_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    page = _completed_page(table_ptr, lengths_ptr, active_ptr, tl.program_id(0), table_stride, page_size)
    if page >= 0:
        _write_bounds(
            addresses_ptr,
            first_ptr,
            bounds_ptr,
            page,
            layer_stride,
            slot_stride,
            head_stride,
            kv_heads,
            head_dim,
            page_size,
            columns,
        )
        _note_built(built_ptr, generations_ptr, page)


@triton.jit  # type: ignore[untyped-decorator]
def _write_norms(
    addresses_ptr: tl.tensor,
    first_ptr: tl.tensor,
    reciprocals_ptr: tl.tensor,
    page: tl.tensor,
    layer_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    keys: tl.constexpr,
    block_dim: tl.constexpr,
) -> None:
    layer = tl.program_id(1)
    # Keys of a page are numbered as their norms are stored: slot by slot, head by head.
    number = tl.program_id(2) * keys + tl.arange(0, keys)
    inside = number < page_size * kv_heads
    slot = page.to(tl.int64) * page_size + number // kv_heads
    dim = tl.arange(0, block_dim)
    vectors = tl.load(
        layer_keys(addresses_ptr, first_ptr, layer)
        + (slot * slot_stride + number % kv_heads * head_stride)[:, None]
        + dim[None, :],
        mask=inside[:, None] & (dim < head_dim)[None, :],
        other=0.0,
    ).to(tl.float32)
    norms = tl.maximum(tl.sqrt_rn(tl.sum(vectors * vectors, 1)), _SMALLEST)
    target = layer.to(tl.int64) * layer_stride + page.to(tl.int64) * (page_size * kv_heads) + number
    tl.store(reciprocals_ptr + target, tl.div_rn(1.0, norms), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norms_kernel(
    addresses_ptr: tl.tensor,
    first_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    reciprocals_ptr: tl.tensor,
    layer_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    keys: tl.constexpr,
    block_dim: tl.constexpr,
) -> None:
    page = tl.load(pages_ptr + tl.program_id(0))
    _write_norms(
        addresses_ptr,
        first_ptr,
        reciprocals_ptr,
        page,
        layer_stride,
        slot_stride,
        head_stride,
        kv_heads,
        head_dim,
        page_size,
        keys,
        block_dim,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _extend_norms_kernel(
    addresses_ptr: tl.tensor,
    first_ptr: tl.tensor,
    table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    active_ptr: tl.tensor,
    reciprocals_ptr: tl.tensor,
    built_ptr: tl.tensor,
    generations_ptr: tl.tensor,
    table_stride: tl.tensor,
    layer_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    keys: tl.constexpr,
    block_dim: tl.constexpr,
) -> None:
    page = _completed_page(table_ptr, lengths_ptr, active_ptr, tl.program_id(0), table_stride, page_size)
    if page >= 0:
        _write_norms(
            addresses_ptr,
            first_ptr,
            reciprocals_ptr,
            page,
            layer_stride,
            slot_stride,
            head_stride,
            kv_heads,
            head_dim,
            page_size,
            keys,
            block_dim,
        )
        _note_built(built_ptr, generations_ptr, page)
