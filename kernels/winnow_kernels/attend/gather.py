"""Reading the KV cache: the one place where keys and values are fetched and counted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from winnow_kernels.attend.early_termination import TILE, Dealt, Termination
from winnow_kernels.batch import Count
from winnow_kernels.cache import NARROW, Context, LayerCache
from winnow_kernels.selection.tokens import Selection


@dataclass(frozen=True, eq=False)
class Reading:
    """What was read of a selection.

    Attributes:
        selection: of all rows.
        dealt: the tiles that it was dealt out in, under early termination; None if it was read to its end.
        tiles: int64 [requests, KV heads, splits]; how many tiles each split has read. None likewise.
    """

    selection: Selection
    dealt: Dealt | None = None
    tiles: Tensor | None = None

    def slots(self, row: int, head: int) -> Tensor:
        """Return the slots that a KV head of a request has read, int64 [tokens]."""
        chosen = self.selection.slots[row, head, : int(self.selection.counts[row, head])]
        if self.dealt is None or self.tiles is None:
            return chosen
        of_splits = self.dealt.tiles[row, head]
        is_read = torch.arange(of_splits.shape[1], device=chosen.device) < self.tiles[row, head, :, None]
        entries = (of_splits[is_read][:, None] * TILE + torch.arange(TILE, device=chosen.device)).flatten()
        return chosen[entries[entries < len(chosen)]]


class Meter:
    """What the requests of a batch read from KV cache and index, summed over layers, KV heads and steps.

    Attributes:
        attended: int64 [requests]; tokens whose key and value were read, each once for each KV head.
        read_bytes: int64 [requests]; bytes read from KV cache and index.
        context: int64 [requests]; tokens in context, for each layer and KV head that attended.
        context_bytes: int64 [requests]; bytes that dense attention reads for them.
        traversals: int64 [requests]; selections read under early termination, one for each layer, KV head and step.
        terminated: int64 [requests]; those whose reading stopped before the selection's end.
        tiles: int64 [requests]; tiles of these selections.
        skipped_tiles: int64 [requests]; tiles of them that were not read.
    """

    def __init__(self, requests: int, device: torch.device) -> None:
        (
            self.context,
            self.attended,
            self.context_bytes,
            self.read_bytes,
            self.traversals,
            self.terminated,
            self.tiles,
            self.skipped_tiles,
        ) = torch.zeros(len(Count), requests, dtype=torch.int64, device=device)

    def count_context(self, context: Context, cache: LayerCache) -> None:
        """Count a layer's whole context: what the ratios are of."""
        tokens = context.lengths * cache.kv_heads
        self.context += tokens
        self.context_bytes += tokens * (2 * cache.vector_bytes)

    def count_attended(self, tokens: Tensor, cache: LayerCache) -> None:
        """Count ``tokens``, int64 [requests], whose key and value were read (summed over KV heads)."""
        self.attended += tokens
        self.read_bytes += tokens * (2 * cache.vector_bytes)

    def note_mass(self, log_sum_exp: Tensor) -> None:
        """Take what a layer's attended tokens weigh: the log-sum-exp of their scores, float32 [requests, query heads].

        A server has no use for it. Who compares it with exact attention's keeps it.
        """

    def note_reading(self, reading: Reading) -> None:
        """Take what a layer has read of a selection; nothing is noted where it attends to all.

        Only who explains a step keeps it.
        """

    def of_rows(self, rows: int) -> Meter:
        """Return an empty meter for ``rows`` of the requests, which is to be added to this one."""
        return Meter(rows, self.attended.device)

    def add(self, part: Meter, rows: list[int]) -> None:
        """Add what ``part``, of ``of_rows``, has counted of some of the requests."""
        for column in Count:
            name = column.name.lower()
            getattr(self, name)[rows] += getattr(part, name)

    def count_bytes(self, amounts: Tensor | int) -> None:
        """Count bytes read, int64 [requests] or the same for all: an index, or keys without their values."""
        self.read_bytes += amounts

    def count_termination(
        self, termination: Termination, tiles: Tensor, read: Tensor, to_the_end: Tensor | None
    ) -> None:
        """Count selections of ``tiles`` of which ``read`` were read, both int64 [requests, KV heads].

        Requests without early termination (infinite patience) are left out, and what is read ``to_the_end`` anyway.
        """
        counted = termination.patience.isfinite()[:, None]
        if to_the_end is not None:
            counted = counted & ~to_the_end
        counted = counted.expand_as(tiles)
        self.traversals += counted.sum(1)
        self.terminated += (counted & (read < tiles)).sum(1)
        self.tiles += tiles.where(counted, 0).sum(1)
        self.skipped_tiles += (tiles - read).where(counted, 0).sum(1)


def gather_keys(cache: LayerCache, selection: Selection, meter: Meter) -> Tensor:
    """Read the keys of a selection to score them; returns [requests, KV heads, width, head dim], in the cache's dtype.

    Entries beyond the counts repeat an entry within.
    """
    meter.count_bytes(selection.counts.sum(1) * cache.vector_bytes)
    return _gather(cache.keys, selection)


def gather_keys_and_values(cache: LayerCache, selection: Selection, meter: Meter) -> tuple[Tensor, Tensor]:
    """Read the keys and values of a selection to attend to them; each [requests, KV heads, width, head dim].

    Entries beyond the counts repeat an entry within.
    """
    meter.count_attended(selection.counts.sum(1), cache)
    return _gather(cache.keys, selection), _gather(cache.values, selection)


def peek_keys(cache: LayerCache, selection: Selection) -> Tensor:
    """``gather_keys`` without counting, for who counts what was read by itself."""
    return _gather(cache.keys, selection)


def peek_keys_and_values(cache: LayerCache, selection: Selection) -> tuple[Tensor, Tensor]:
    """``gather_keys_and_values`` without counting, for who can say only afterwards what was needed, and counts that."""
    return _gather(cache.keys, selection), _gather(cache.values, selection)


def _gather(vectors: Tensor, selection: Selection) -> Tensor:
    slots = selection.slots.where(selection.filled, selection.slots[..., :1])
    heads = torch.arange(vectors.shape[1], device=vectors.device)[:, None]
    # One flat index is several times as fast as two, and index_select as advanced indexing.
    flat = (slots * vectors.shape[1] + heads).flatten()
    # Not every release of torch picks numbers of 8 bits on CUDA; all pick bytes.
    stored = vectors.view(torch.uint8) if vectors.dtype in NARROW else vectors
    return stored.flatten(0, 1).index_select(0, flat).view(vectors.dtype).view(*slots.shape, -1)
