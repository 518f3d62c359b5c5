"""Arguments that belong together, as named tuples: a kernel takes them whole, and hands them on to its helpers whole.

Triton takes a named tuple apart when it launches. Each tensor and number in it is specialised as if it were an argument
of its own, and a ``tl.constexpr`` in it is known to the compiler. A launch costs no more, and a replay of a CUDA graph
nothing. Only a number that must not be specialised (``do_not_specialize``), as a layer's, stays outside.

In a kernel a tuple's ``values`` and ``type`` are Triton's: no field can be called so. A tuple of tuples holds nothing
else: if a tensor lies beside them, Triton 3.6 forgets behind a branch or a loop what is constant in an inner one.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import DecodeBatch, DeviceSelection
from winnow_kernels.cache import LayerCache

Pointer: TypeAlias = Any
"""A tensor where a kernel is launched, a pointer in the kernel."""
Number: TypeAlias = Any
"""An int or float where a kernel is launched, a scalar in the kernel."""
Constant: TypeAlias = Any
"""A ``tl.constexpr``: an int or bool that the compiler knows."""


class Rows(NamedTuple):
    """Where the contexts of a batch's rows lie (``DecodeBatch``)."""

    page_table: Pointer
    table_stride: Number
    lengths: Pointer
    page_size: Constant
    page_bits: Constant

    @classmethod
    def of(cls, batch: DecodeBatch) -> Rows:
        """Return those of ``batch``."""
        sizes = (batch.page_size, batch.page_size.bit_length() - 1)
        return cls(batch.page_table, batch.page_table.stride(0), batch.lengths, *map(tl.constexpr, sizes))


class Vectors(NamedTuple):
    """Vectors by row and head, whose numbers lie next to each other: queries, outputs, or keys by slot and KV head."""

    pointer: Pointer
    row_stride: Number
    head_stride: Number

    @classmethod
    def of(cls, vectors: Tensor) -> Vectors:
        """Return those of ``vectors``, [rows, heads, head dim]."""
        return cls(vectors, vectors.stride(0), vectors.stride(1))


class KeysAndValues(NamedTuple):
    """A layer's KV cache, whose keys and values are strided alike."""

    keys_ptr: Pointer
    values_ptr: Pointer
    slot_stride: Number
    head_stride: Number

    @classmethod
    def of(cls, cache: LayerCache) -> KeysAndValues:
        """Return those of ``cache``."""
        assert cache.keys.stride() == cache.values.stride()
        return cls(cache.keys, cache.values, cache.keys.stride(0), cache.keys.stride(1))


class Heads(NamedTuple):
    """A layer's heads: their numbers, and those of a head, with the power of two, at least 16, that holds them.

    Tensor cores multiply no fewer than 16.
    """

    kv_heads: Constant
    group: Constant
    head_dim: Constant
    dim_block: Constant

    @classmethod
    def of(cls, query_heads: int, cache: LayerCache) -> Heads:
        """Return those of a layer with ``query_heads`` over ``cache``."""
        return cls.sized(query_heads, cache.kv_heads, cache.head_dim)

    @classmethod
    def sized(cls, query_heads: int, kv_heads: int, head_dim: int) -> Heads:
        """Return those of a layer with so many."""
        sizes = (kv_heads, query_heads // kv_heads, head_dim, max(16, triton.next_power_of_2(head_dim)))
        return cls(*map(tl.constexpr, sizes))


class Counts(NamedTuple):
    """What rows read in a step (``DecodeBatch.counts``)."""

    pointer: Pointer
    row_stride: Number

    @classmethod
    def of(cls, batch: DecodeBatch) -> Counts:
        """Return that of ``batch``."""
        return cls(batch.counts, batch.counts.stride(0))


class Selected(NamedTuple):
    """What each row and KV head attends to (``DeviceSelection``); ``width`` slots from one to the next."""

    slots: Pointer
    counts: Pointer
    width: Number

    @classmethod
    def of(cls, selection: DeviceSelection) -> Selected:
        """Return that of ``selection``, which must be contiguous."""
        assert selection.slots.is_contiguous()
        assert selection.counts.is_contiguous()
        return cls(selection.slots, selection.counts, selection.slots.shape[2])
