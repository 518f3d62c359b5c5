"""What all decode kernels share: where the rows of a batch lie, what they selected, and what they read.

Everything is a tensor at a fixed address, so that a CUDA graph can be captured once and replayed with other contents.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import torch
from torch import Tensor

WHOLE: Final = -1
"""As a selection's count: the whole context is attended to, and the selection holds no slots."""
WHOLE_TO_THE_END: Final = -2
"""As a selection's count: like ``WHOLE``, and early termination leaves this layer of the row alone."""
ELSEWHERE: Final = 0
"""As a selection's count: another kernel attends for the row in this layer, and counts what it reads."""
NOTHING_ANEW: Final = 2**31 - 1
"""As ``DecodeBatch.anew_from``: behind every position."""
NO_MASS: Final = -1e30
"""Logarithm of no mass; finite, so that differences stay numbers."""


class Count(IntEnum):
    """A column of ``DecodeBatch.counts``; as in ``attend.gather.Meter``."""

    CONTEXT = 0
    ATTENDED = 1
    CONTEXT_BYTES = 2
    READ_BYTES = 3
    TRAVERSALS = 4
    TERMINATED = 5
    TILES = 6
    SKIPPED_TILES = 7


COUNTS: Final = len(Count)


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """The rows of a decode batch. A row is one request, or padding: one token of slot 0, dense.

    Attributes:
        page_size: slots in a page; a power of two, at least 16.
        page_table: int32 [rows, pages]; the page, slot // ``page_size``, of each page of a context. Beyond it any page.
        lengths: int32 [rows], at least 1; tokens in the context, with the one that is being decoded.
        counts: int64 [rows, COUNTS]; what the rows read in this step, summed over layers and KV heads. Kernels add.
        anew_from: int32 [rows]; the first position whose key was written anew since the row's last step, as by a check
            of drafts, of which it writes no more than ``MAX_DRAFT_TOKENS`` + 1; ``NOTHING_ANEW`` for none.
    """

    page_size: int
    page_table: Tensor
    lengths: Tensor
    counts: Tensor
    anew_from: Tensor

    @classmethod
    def empty(cls, rows: int, longest: int, page_size: int, device: torch.device) -> DecodeBatch:
        """Return a batch of ``rows`` padding rows, with room for contexts of ``longest`` tokens."""
        return cls(
            page_size,
            torch.zeros(rows, -(-longest // page_size), dtype=torch.int32, device=device),
            torch.ones(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, COUNTS, dtype=torch.int64, device=device),
            torch.full((rows,), NOTHING_ANEW, dtype=torch.int32, device=device),
        )

    def __getitem__(self, rows: slice) -> DecodeBatch:
        """Return some of the rows."""
        return DecodeBatch(
            self.page_size, self.page_table[rows], self.lengths[rows], self.counts[rows], self.anew_from[rows]
        )

    @property
    def rows(self) -> int:
        return self.page_table.shape[0]

    @property
    def longest(self) -> int:
        """Tokens of the longest context that there is room for."""
        return self.page_table.shape[1] * self.page_size


class ReportedShares(NamedTuple):
    """What selectors believe of the attention mass in a layer, and the share of it that is reported as attended.

    Attributes:
        beliefs: float32 [rows, query heads, 2]; logarithms, base 2, of the mass of the tokens selected and of that of
            all others. Both are ``NO_MASS`` where everything is read, and in rows of which nothing is reported.
        shares: float64 [rows, query heads]; share of the attention mass that was attended, added up over layers: of
            what was read exactly, of the rest as believed.
    """

    beliefs: Tensor
    shares: Tensor

    @classmethod
    def empty(cls, rows: int, query_heads: int, device: torch.device) -> ReportedShares:
        """Return what begins a step."""
        return cls(
            torch.full((rows, query_heads, 2), NO_MASS, dtype=torch.float32, device=device),
            torch.zeros(rows, query_heads, dtype=torch.float64, device=device),
        )

    def of_rows(self, rows: slice) -> ReportedShares:
        """Return those of some rows."""
        return ReportedShares(self.beliefs[rows], self.shares[rows])

    def clear(self) -> None:
        """Begin a step: nothing is believed, and no layer has added a share."""
        self.beliefs.fill_(NO_MASS)
        self.shares.zero_()


@dataclass(frozen=True, eq=False)
class DeviceSelection:
    """What each row and KV head attends to in one layer, in the order in which it is read.

    Attributes:
        slots: int32 [rows, KV heads, width]; from ``counts`` on their content means nothing.
        counts: int32 [rows, KV heads]; at least 1, or ``WHOLE``, ``WHOLE_TO_THE_END`` or ``ELSEWHERE``.
    """

    slots: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, rows: int, kv_heads: int, width: int, device: torch.device) -> DeviceSelection:
        """Return the selection of rows that attend to everything, with room for ``width`` tokens a KV head."""
        return cls(
            torch.zeros(rows, kv_heads, width, dtype=torch.int32, device=device),
            torch.full((rows, kv_heads), WHOLE, dtype=torch.int32, device=device),
        )
