"""Where on the device the positions lie that requests of SnapKV and PyramidKV keep of their prompts."""

from __future__ import annotations

import weakref
from bisect import insort
from typing import Final

import torch
from torch import Tensor

from winnow_kernels.decode.gpu_selector import NoRoomError
from winnow_kernels.decode.request import Request

CAPACITY: Final = 2**26
"""Positions of a server: of 250 requests of a Llama-3.1-8B that keep 1,024 tokens for each KV head."""


class OutOfPositionsError(NoRoomError):
    """The pool has no piece that is long enough."""


class StoredPositions:
    """A pool of positions, in pieces of one request each; a piece is free again when its request is gone.

    Attributes:
        positions: int32 [capacity].
        offsets: int64 [request slots, layers, KV heads]; where a KV head's positions in a layer begin.
        kept: int32 [request slots, layers, KV heads]; how many positions it keeps.
    """

    def __init__(
        self, requests: int, layers: int, kv_heads: int, device: torch.device, capacity: int = CAPACITY
    ) -> None:
        self.positions = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.offsets = torch.zeros(requests, layers, kv_heads, dtype=torch.int64, device=device)
        self.kept = torch.zeros(requests, layers, kv_heads, dtype=torch.int32, device=device)
        # Free pieces by their first position, none next to another.
        self._free: list[tuple[int, int]] = [(0, capacity)]
        self._pieces: weakref.WeakKeyDictionary[Request, tuple[int, int]] = weakref.WeakKeyDictionary()

    def keep(self, request: Request, slot: int, positions: Tensor, kept: Tensor) -> None:
        """Keep a request's ``positions``, int32 [numbers], layer after layer and KV head after KV head.

        Of these each has as many as ``kept`` says, int64 [layers, KV heads].

        Raises:
            OutOfPositionsError: no piece is long enough.
        """
        # One that was retracted has its piece.
        first, length = self._pieces.get(request, (0, 0))
        if length != len(positions):
            first = self._claim(len(positions))
            self._pieces[request] = first, len(positions)
            weakref.finalize(request, self._release, first, len(positions)).atexit = False
        self.positions[first : first + len(positions)] = positions
        counts = kept.flatten()
        before = counts.cumsum(0) - counts
        self.offsets[slot] = (first + before).view_as(kept).to(self.offsets.device)
        self.kept[slot] = kept.int().to(self.kept.device)

    def length(self, request: Request) -> int:
        """Return how many positions are kept of a request: 0 of one that is not known."""
        _, length = self._pieces.get(request, (0, 0))
        return length

    def _claim(self, length: int) -> int:
        for place, (first, free) in enumerate(self._free):
            if free >= length:
                rest = [(first + length, free - length)] if free > length else []
                self._free[place : place + 1] = rest
                return first
        raise OutOfPositionsError(f"no {length} of {len(self.positions)} positions lie free in a row")

    def _release(self, first: int, length: int) -> None:
        insort(self._free, (first, length))
        joined: list[tuple[int, int]] = []
        for start, size in self._free:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        self._free = joined
