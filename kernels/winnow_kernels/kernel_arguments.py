"""Arguments that belong together, as named tuples: a kernel takes them whole, and hands them on to its helpers whole.

Triton takes a named tuple apart when it launches. Each tensor and number in it is specialised as if it were an argument
of its own, and a ``tl.constexpr`` in it is known to the compiler. A launch costs no more, and a replay of a CUDA graph
nothing. Only a number that must not be specialised (``do_not_specialize``), as a layer's, stays outside.
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

    @classmethod
    def of(cls, batch: DecodeBatch) -> Rows:
        """Return those of ``batch``."""
        return cls(batch.page_table, batch.page_table.stride(0), batch.lengths, tl.constexpr(batch.page_size))


class Vectors(NamedTuple):
    """Vectors by row and head, whose numbers lie next to each other: queries, outputs, or keys by slot and KV head."""

    pointer: Pointer
    row_stride: Number
    head_stride: Number

    @classmethod
    def of(cls, vectors: Tensor) -> Vectors:
        """Return those of ``vectors``, [rows, heads, head dim]."""
        return cls(vectors, vectors.stride(0), vectors.stride(1))


class Heads(NamedTuple):
    """A layer's heads: their numbers, and those of a head, with the power of two that holds them."""

    kv_heads: Constant
    group: Constant
    head_dim: Constant
    dim_block: Constant

    @classmethod
    def of(cls, query_heads: int, cache: LayerCache) -> Heads:
        """Return those of a layer with ``query_heads`` over ``cache``."""
        sizes = (cache.kv_heads, query_heads // cache.kv_heads, cache.head_dim)
        return cls(*(tl.constexpr(size) for size in (*sizes, triton.next_power_of_2(cache.head_dim))))


class Selected(NamedTuple):
    """What each row and KV head attends to (``DeviceSelection``); ``width`` slots from one to the next."""

    slots: Pointer
    counts: Pointer
    width: Number

    @classmethod
    def of(cls, selection: DeviceSelection) -> Selected:
        """Return that of ``selection``, which must be contiguous."""
        return cls(selection.slots, selection.counts, selection.slots.shape[2])
