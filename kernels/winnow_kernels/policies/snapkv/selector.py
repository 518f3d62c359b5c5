"""What is kept of prompts in the decode steps of a server on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.compaction import room_for
from winnow_kernels.decode.gpu_compaction import Compaction
from winnow_kernels.decode.gpu_selector import Entry, MovingSelector, Server
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.request import Request
from winnow_kernels.host_tensors import to_device
from winnow_kernels.policies.snapkv import gpu
from winnow_kernels.policies.snapkv.gpu import StoredRows
from winnow_kernels.policies.snapkv.gpu_positions import StoredPositions

KIND = "snapkv"


class StoredSelector(MovingSelector):
    """What SnapKV and PyramidKV keep of their prompts."""

    def __init__(self, server: Server) -> None:
        caches, step = server.caches, server.step
        self._caches = caches
        self._scale = server.scale
        self._generations, self._ranks = server.indexes.generations, server.ranks
        self._compaction = Compaction(caches)
        self._stored = StoredPositions(server.requests, len(caches), caches[0].kv_heads, step.slots.device)
        empty = StoredRows.empty(step.rows, len(caches), caches[0].kv_heads, 1, step.slots.device)
        self._offsets, self._kept = empty.offsets, empty.kept

    def enter(self, request: Request, slot: int, context: Context) -> Entry:
        kept = request.kept
        assert kept is not None
        if kept.moved is not None:
            # In this slot: where it lies is known.
            return Entry()
        votes = Meter(1, context.device)
        for layer, cache in enumerate(self._caches):
            if layer not in kept.kept:
                kept.vote(layer, cache, context.slots[0, : request.prompt_length], self._scale, votes)
        self._keep(request, slot, kept.kept)
        return Entry(read_bytes=votes.read_bytes)

    def room(self, request: Request) -> int:
        assert request.kept is not None
        room = room_for(request.kept.kept)
        if self._ranks.reduce is None:
            return room
        # Where KV heads share a budget, one of another rank may keep more.
        most = torch.full((1,), room, device=self._offsets.device)
        self._ranks.maximize(most)
        return int(most)

    def move(self, request: Request, slot: int, prompt: Tensor, begin: int) -> None:
        kept = request.kept
        assert kept is not None
        self._generations.written(prompt[begin : begin + room_for(kept.kept)])
        self._keep(request, slot, self._compaction.move(kept.kept, prompt, begin))
        kept.moved = {}

    def _keep(self, request: Request, slot: int, places: Mapping[int, Tensor]) -> None:
        assert request.kept is not None
        layers = range(len(self._caches))
        counts = torch.stack([request.kept.counts(layer) for layer in layers])
        total = self._stored.length(request) or int(counts.sum())
        positions = kept_positions([places[layer] for layer in layers], counts, total)
        self._stored.keep(request, slot, positions, counts)

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


def kept_positions(kept: Sequence[Tensor], counts: Tensor, total: int) -> Tensor:
    """Return what a request keeps, one layer and KV head after another: int32 [``total``]. It waits for no device.

    Args:
        kept: for each layer, [KV heads, most].
        counts: int64 [layers, KV heads]; how many of these count.
        total: their sum.
    """
    widths = torch.tensor([of_layer.shape[1] for of_layer in kept for _ in of_layer])
    begins = to_device(widths.cumsum(0) - widths, counts.device)
    own = counts.flatten()
    # How much further each head's begin among all that is there than among all that counts.
    further = (begins - (own.cumsum(0) - own)).repeat_interleave(own, output_size=total)
    everything = torch.cat([of_layer.flatten() for of_layer in kept])
    return everything[torch.arange(total, device=counts.device) + further].int()
