"""The blocks of queries of one prefill pass: each attends to a selection before it and causally to its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from winnow_kernels.host_tensors import to_device

WHOLE: Final = -1
"""In place of a budget: the block attends to everything before it."""
ALIGNMENT: Final = 16
"""Lengths of rows in memory are multiples of it: vectors are loaded whole, and for others kernels are compiled anew."""


def aligned(length: int) -> int:
    """Return the length of a row that has room for ``length`` numbers."""
    return -(-length // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Block:
    """A block on a request's grid of absolute positions, or what a prefill chunk leaves of it.

    Attributes:
        row: of the request, in the page table.
        start: position of the block's first token.
        begin: position of its first query in this pass; more than ``start`` where the chunk begins inside the block.
        end: position behind its last query.
        first_query: where the query of position ``begin`` lies among the queries of the pass.
        budget: tokens before ``start`` to select, less than ``start``; or ``WHOLE``.
        representatives: queries that speak for the block, at most (N_Q in the paper); 0 if ``budget`` is ``WHOLE``.
        sinks: first tokens that are always selected, inside the budget.
        recent: tokens right before ``start`` that are, too; sinks and these are no more than the budget.
    """

    row: int
    start: int
    begin: int
    end: int
    first_query: int
    budget: int
    representatives: int
    sinks: int = 0
    recent: int = 0

    @property
    def queries(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class PrefillBlocks:
    """All blocks of a pass, on the host and on the device.

    Attributes:
        blocks: on the host; launches depend on them.
        fields: int32 [blocks, 9], on the device: each block's attributes, in the order of ``Block``.
        page_table: int32 [rows, pages]; the token of a row at position i lies in slot
            ``page_table[row, i // page_size] * page_size + i % page_size``.
        page_size: tokens in a page; a power of two.
    """

    blocks: Sequence[Block]
    fields: Tensor
    page_table: Tensor
    page_size: int

    @classmethod
    def of(cls, blocks: Sequence[Block], page_table: Tensor, page_size: int) -> PrefillBlocks:
        """Copy ``blocks`` to the device of ``page_table``."""
        rows = [
            (b.row, b.start, b.begin, b.end, b.first_query, b.budget, b.representatives, b.sinks, b.recent)
            for b in blocks
        ]
        fields = torch.tensor(rows, dtype=torch.int32).view(-1, 9)
        return cls(blocks, to_device(fields, page_table.device), page_table, page_size)
