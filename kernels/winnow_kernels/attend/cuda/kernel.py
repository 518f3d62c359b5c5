"""Launching attention to splits in CUDA C++."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import torch

from winnow_kernels.attend.early_termination import TILE
from winnow_kernels.attend.gpu_merge import LONG_RUN, PARTIAL_SLOTS, RUNS_TO_FILL, SHORT_RUN, Partial
from winnow_kernels.batch import NO_MASS, WHOLE_TO_THE_END, DeviceSelection
from winnow_kernels.cache import LayerCache, widened_dtype
from winnow_kernels.cuda.module import Launchable, Load, loaded, runs_on, source_of
from winnow_kernels.cuda.products import HEADS_OF_PRODUCT, PRODUCTS, macros_of, multiplies

if TYPE_CHECKING:
    from torch import Tensor

    from winnow_kernels.batch import DecodeBatch

PAIRS: Final = 1024
"""Rows × KV heads of a launch, at most; each takes 8 bytes of shared memory."""
_SOURCE: Final = Path(__file__).with_name("attend.cu")
_HEAD_DIMS: Final = (64, 128)
# There may be two products beside each other.
_MAX_GROUP: Final = 2 * HEADS_OF_PRODUCT
_WARPS: Final = 4
# Shared memory that a block takes beside its own.
_OF_BLOCK: Final = 1 << 10
_POINTERS: Final = (
    "queries",
    "keys",
    "values",
    "page_table",
    "lengths",
    "slots",
    "counts",
    "thresholds",
    "outputs",
    "masses",
)
_STRIDES: Final = ("row_stride", "head_stride", "table_stride", "width")
_NUMBERS: Final = ("slot_bytes", "head_bytes", "pairs", "page_bits")


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int) for name in _NUMBERS),
        ("scale_log2", ctypes.c_float),
    )


def serves(cache: LayerCache, query_heads: int) -> bool:
    """Return whether there is a kernel for layers like ``cache``."""
    group = query_heads // cache.kv_heads
    is_in_shape = cache.head_dim in _HEAD_DIMS and group <= _MAX_GROUP
    return multiplies(cache.keys.dtype) and is_in_shape and cache.softmax.cap is None


def fits(device: torch.device, cache: LayerCache, query_heads: int) -> bool:
    """Return whether ``device`` runs the kernel for layers like ``cache``, with as many blocks as it is made for."""
    if not runs_on(device):
        return False
    group = query_heads // cache.kv_heads
    needed = blocks_of_multiprocessor(cache, group) * (shared_bytes(cache, group) + _OF_BLOCK)
    return needed <= torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


@dataclass(frozen=True, eq=False)
class CudaAttend:
    """The kernel for layers of one shape.

    Attributes:
        kernel: attends to the splits of all rows but those that may terminate early.
        dtype: of queries.
        blocks: of its grid, which share the splits.
    """

    kernel: Launchable
    dtype: torch.dtype
    blocks: int

    @classmethod
    def on(cls, device: torch.device, cache: LayerCache, query_heads: int, load: Load = loaded) -> Self:
        """Return that for layers like ``cache`` on a device.

        Args:
            device: of the rows.
            cache: a layer's.
            query_heads: of a layer.
            load: what loads kernels there.

        Raises:
            RuntimeError: CUDA refuses.
        """
        group, dtype = query_heads // cache.kv_heads, widened_dtype(cache.keys.dtype)
        size = shared_bytes(cache, group)
        kernel = load(source_for(cache, group), (("attend_kernel", 32 * _WARPS, size),), device)["attend_kernel"]
        return cls(kernel, dtype, kernel.blocks_at_once(device))

    def launch(
        self,
        queries: Tensor,
        cache: LayerCache,
        batch: DecodeBatch,
        selection: DeviceSelection,
        scale_log2: float,
        thresholds: Tensor | None,
        partial: Partial,
    ) -> None:
        """Attend to the splits of rows that cannot terminate early; arguments are those of ``attend.gpu.attend``."""
        of_launch = PAIRS // cache.kv_heads
        if batch.rows > of_launch:
            for first in range(0, batch.rows, of_launch):
                some = slice(first, min(first + of_launch, batch.rows))
                own = DeviceSelection(selection.slots[some], selection.counts[some])
                of_rows = None if thresholds is None else thresholds[some]
                to = Partial(*(t[some] for t in partial))
                self.launch(queries[some], cache, batch[some], own, scale_log2, of_rows, to)
            return
        keys, values = cache.keys, cache.values
        assert queries.dtype == self.dtype
        assert keys.stride() == values.stride()
        assert queries.stride(2) == keys.stride(2) == 1
        # Lanes load 16 bytes of keys and values, and 8 of queries.
        assert keys.data_ptr() % 16 == values.data_ptr() % 16 == queries.data_ptr() % 8 == 0
        assert queries.stride(0) % 4 == queries.stride(1) % 4 == 0
        assert batch.page_table.stride(1) == 1
        assert selection.slots.is_contiguous()
        assert selection.counts.is_contiguous()
        pairs, element_size = batch.rows * cache.kv_heads, keys.element_size()
        arguments = _Arguments(
            queries=queries.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            page_table=batch.page_table.data_ptr(),
            lengths=batch.lengths.data_ptr(),
            slots=selection.slots.data_ptr(),
            counts=selection.counts.data_ptr(),
            thresholds=None if thresholds is None else thresholds.data_ptr(),
            outputs=partial.outputs.data_ptr(),
            masses=partial.masses.data_ptr(),
            row_stride=queries.stride(0),
            head_stride=queries.stride(1),
            table_stride=batch.page_table.stride(0),
            width=selection.slots.shape[2],
            slot_bytes=keys.stride(0) * element_size,
            head_bytes=keys.stride(1) * element_size,
            pairs=pairs,
            page_bits=batch.page_size.bit_length() - 1,
            scale_log2=scale_log2,
        )
        self.kernel.launch((min(pairs * PARTIAL_SLOTS, self.blocks), 1), arguments)


def source_for(cache: LayerCache, group: int) -> str:
    """Return the kernel's source for layers like ``cache`` with so many query heads of a KV head."""
    macros = {
        **macros_of(cache.keys.dtype, cache.head_dim, group, cache.kv_heads),
        "WARPS": _WARPS,
        "BLOCKS": blocks_of_multiprocessor(cache, group),
        "STAGES": _stages(cache),
        "SHARED_BYTES": shared_bytes(cache, group),
        "TILE": TILE,
        "PAIRS": PAIRS,
        "PARTIAL_SLOTS": PARTIAL_SLOTS,
        "SHORT_RUN": SHORT_RUN,
        "LONG_RUN": LONG_RUN,
        "RUNS_TO_FILL": RUNS_TO_FILL,
        "WHOLE_TO_THE_END": f"({WHOLE_TO_THE_END})",
        "NO_MASS": f"({NO_MASS}f)",
    }
    return source_of(PRODUCTS, _SOURCE, macros=macros)


def blocks_of_multiprocessor(cache: LayerCache, group: int) -> int:
    """Return how many blocks of ``attend.cu`` a multiprocessor's registers and shared memory have to have room for."""
    if _vector_bytes(cache) > 128:
        return 2
    return 4 if group <= 4 else 3


def shared_bytes(cache: LayerCache, group: int) -> int:
    """Return the shared memory of a block: ``Shared`` of ``attend.cu``."""
    of_heads = group * (cache.head_dim + 4 + 2)
    return _stages(cache) * 2 * TILE * _vector_bytes(cache) + 4 * _WARPS * (of_heads + 1) + 2 * 4 * PAIRS


def _stages(cache: LayerCache) -> int:
    return 2 if _vector_bytes(cache) >= 128 else 4


def _vector_bytes(cache: LayerCache) -> int:
    return cache.head_dim * cache.keys.element_size()
