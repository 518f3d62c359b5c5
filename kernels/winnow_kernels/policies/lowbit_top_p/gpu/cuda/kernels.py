"""Launching what is in CUDA C++ of a layer's selection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import torch
import triton

from winnow_kernels.batch import DeviceSelection
from winnow_kernels.cache import widened_dtype
from winnow_kernels.cuda.module import Launchable, Load, loaded, runs_on
from winnow_kernels.cuda.products import multiplies
from winnow_kernels.policies.lowbit_top_p.gpu.cuda.arguments import (
    BITS,
    BLOCKS_OF_PAIR,
    LIST_WARPS,
    PAIRS,
    POINTERS,
    TAKE_WARPS,
    Arguments,
    Lists,
    Sizes,
    least_taking,
)
from winnow_kernels.selection.gpu_partition import programs_on

if TYPE_CHECKING:
    from torch import Tensor

    from winnow_kernels.policies.lowbit_top_p.gpu.layer import Layer
    from winnow_kernels.policies.lowbit_top_p.gpu.state import Anchors, Scratch

# By head dim: lanes hold whole words of two tokens' codes, or of one's.
_MAX_GROUP: Final = {64: 4, 128: 8}
# Tiles that a block takes at least.
_TILES_TAKEN: Final = 8
_TAKING_ON_MULTIPROCESSOR: Final = 4


def serves(sizes: Sizes, bits: int) -> bool:
    """Return whether there are kernels for these sizes, and codes of ``bits`` bits."""
    is_in_shape = sizes.kv_heads <= PAIRS and sizes.group <= _MAX_GROUP.get(sizes.head_dim, 0)
    return bits == BITS and is_in_shape and multiplies(sizes.stored)


def fits(device: torch.device, sizes: Sizes) -> bool:
    """Return whether ``device`` runs the kernels for these sizes."""
    if not runs_on(device):
        return False
    # Torch has it, but not in its annotations.
    limit: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return limit >= sizes.list_bytes


@dataclass(frozen=True, eq=False)
class CudaKernels:
    """The kernels for a layer's sizes, and the memory in which one hands on to the next.

    Attributes:
        sizes: of the layers.
        lists: for as many rows as are selected for at once.
        list: rounds queries, scores codes, and lists what may be selected.
        list_again: does that for the pairs that were listed too short.
        take: writes what is selected.
        blocks: that list.
        blocks_again: that list again, as a rule nothing: so few that there is room for those that take beside them.
        blocks_taking: that take, of all pairs.
    """

    sizes: Sizes
    lists: Lists
    list: Launchable
    list_again: Launchable
    take: Launchable
    blocks: int
    blocks_again: int
    blocks_taking: int

    @classmethod
    def on(cls, device: torch.device, sizes: Sizes, rows: int, tokens: int, load: Load = loaded) -> Self:
        """Return those for ``rows`` rows of up to ``tokens`` tokens on a device.

        Args:
            device: of the rows.
            sizes: of the layers.
            rows: of a batch.
            tokens: of a context.
            load: what loads kernels there.

        Raises:
            RuntimeError: CUDA refuses.
        """
        lists = Lists.empty(rows, sizes, tokens, device)
        names = tuple((name, 32 * LIST_WARPS, sizes.list_bytes) for name in ("list_kernel", "list_again_kernel"))
        listing = load(sizes.source("list.cu"), names, device)
        taking = load(
            sizes.source("take.cu"), (("take_kernel", 32 * TAKE_WARPS, sizes.take_bytes(lists.tiles)),), device
        )
        blocks = listing["list_kernel"].blocks_at_once(device)
        return cls(
            sizes,
            lists,
            listing["list_kernel"],
            listing["list_again_kernel"],
            taking["take_kernel"],
            blocks,
            max(1, blocks // 2),
            programs_on(device, _TAKING_ON_MULTIPROCESSOR),
        )

    def steps(
        self,
        layer: Layer,
        scratch: Scratch,
        anchors: Anchors,
        selection: DeviceSelection,
        beliefs: Tensor,
        *,
        in_order: bool,
    ) -> dict[str, Callable[[], object]]:
        """Return what is launched, in order, by name; arguments are those of ``selection.launches``."""
        arguments = self._arguments(layer, scratch, anchors, selection, beliefs, in_order=in_order)
        pairs = layer.batch.rows * self.sizes.kv_heads
        assert pairs <= PAIRS
        tiles = self.lists.tiles
        wanted = min(BLOCKS_OF_PAIR, triton.cdiv(tiles, _TILES_TAKEN), max(1, self.blocks_taking // pairs))
        of_pair = max(wanted, least_taking(tiles))
        return {
            "list": lambda: self.list.launch((self.blocks, 1), arguments),
            "list again": lambda: self.list_again.launch((self.blocks_again, 1), arguments),
            "take": lambda: self.take.launch((of_pair, pairs), arguments),
        }

    def _arguments(
        self,
        layer: Layer,
        scratch: Scratch,
        anchors: Anchors,
        selection: DeviceSelection,
        beliefs: Tensor,
        *,
        in_order: bool,
    ) -> Arguments:
        batch, queries, keys = layer.batch, layer.queries, layer.cache.keys
        tensors = {
            **layer.policies._asdict(),
            "pieces": layer.index.pieces[layer.number],
            **scratch._asdict(),
            **self.lists._asdict(),
            "page_table": batch.page_table,
            "lengths": batch.lengths,
            "slots": anchors.slots,
            "queries": queries,
            "keys": keys,
            "anchor_tops": anchors.tops,
            "anchor_cuts": anchors.cuts,
            "anchor_ends": anchors.ends,
            "selected_slots": selection.slots,
            "selected_counts": selection.counts,
            "read": batch.counts,
            "beliefs": beliefs,
        }
        strided = ("page_table", "read", "queries", "keys")
        assert all(tensors[name].is_contiguous() for name in POINTERS if name not in strided)
        assert all(tensors[name].stride(-1) == 1 for name in strided)
        assert (queries.dtype, keys.dtype) == (widened_dtype(self.sizes.stored), self.sizes.stored)
        # Lanes load 16 bytes of keys, and 8 of queries.
        assert keys.data_ptr() % 16 == queries.data_ptr() % 8 == 0
        assert queries.stride(0) % 4 == queries.stride(1) % 4 == 0
        return Arguments(
            **{name: tensors[name].data_ptr() for name in POINTERS},
            table_stride=batch.page_table.stride(0),
            tokens=scratch.tokens,
            width=selection.slots.shape[2],
            read_stride=batch.counts.stride(0),
            query_row_stride=queries.stride(0),
            query_head_stride=queries.stride(1),
            slot_bytes=keys.stride(0) * keys.element_size(),
            head_bytes=keys.stride(1) * keys.element_size(),
            tiles=self.lists.tiles,
            rows=batch.rows,
            key_bytes=layer.cache.vector_bytes,
            in_order=in_order,
            scale_log2=layer.scale * math.log2(math.e),
        )
