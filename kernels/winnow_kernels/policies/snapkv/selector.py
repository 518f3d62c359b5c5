"""What is kept of prompts in the decode steps of a server on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.gpu_selector import Entry, Selector, Server
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.request import Request
from winnow_kernels.policies.snapkv import gpu
from winnow_kernels.policies.snapkv.gpu import StoredRows
from winnow_kernels.policies.snapkv.gpu_positions import StoredPositions

KIND = "snapkv"


class StoredSelector(Selector):
    """What SnapKV and PyramidKV keep of their prompts."""

    def __init__(self, server: Server) -> None:
        caches, step = server.caches, server.step
        self._caches = caches
        self._scale = server.scale
        self._stored = StoredPositions(server.requests, len(caches), caches[0].kv_heads, step.slots.device)
        empty = StoredRows.empty(step.rows, len(caches), caches[0].kv_heads, 1, step.slots.device)
        self._offsets, self._kept = empty.offsets, empty.kept

    def enter(self, request: Request, slot: int, context: Context) -> Entry:
        kept = request.kept
        assert kept is not None
        votes = Meter(1, context.device)
        for layer, cache in enumerate(self._caches):
            if layer not in kept.kept:
                kept.vote(layer, cache, context.slots[0, : request.prompt_length], self._scale, votes)
        layers = range(len(self._caches))
        counts = torch.stack([kept.counts(layer) for layer in layers])
        positions = kept_positions([kept.kept[layer] for layer in layers], counts)
        self._stored.keep(request, slot, positions, counts)
        return Entry(read_bytes=votes.read_bytes)

    def begin(self, step: Step, *, ordered: bool) -> None:
        del ordered
        torch.index_select(self._stored.offsets, 0, step.request_slots, out=self._offsets[: step.rows])
        torch.index_select(self._stored.kept, 0, step.request_slots, out=self._kept[: step.rows])

    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        del queries, cache
        rows = StoredRows(
            self._stored.positions,
            self._offsets[: step.rows],
            self._kept[: step.rows],
            step.parameters.own(KIND, "prompt_length"),
        )
        gpu.select(layer, step.batch, rows, step.selection(layer))


def kept_positions(kept: Sequence[Tensor], counts: Tensor) -> Tensor:
    """Return what a request keeps, one layer and KV head after another: int32 [numbers].

    Args:
        kept: for each layer, [KV heads, most].
        counts: int64 [layers, KV heads]; how many of these count.
    """
    own = [
        of_layer[torch.arange(of_layer.shape[1], device=of_layer.device) < counts_of_layer[:, None]]
        for of_layer, counts_of_layer in zip(kept, counts, strict=True)
    ]
    return torch.cat(own).int()
