"""Tensor parallelism: what the ranks that share out every layer's heads must tell each other.

Each rank attends with its own query heads and holds their KV heads, and most of what policies do stays within a KV
head. Two things do not: DELTA ranks tokens by all query heads, and what a request cost is the cost of all ranks. Where
ranks outnumber KV heads, SGLang gives several ranks a copy of each, with some of its query heads. Each then selects for
these alone, reads its own copy, and counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor
from torch.distributed import ReduceOp

Reduce = Callable[[Tensor, ReduceOp.RedOpType], None]


@dataclass(frozen=True)
class Ranks:
    """All ranks, which call the same methods in the same order and with tensors of the same shapes.

    Attributes:
        rank: the number of this one.
        reduce: combines the ranks' tensors, contiguous, in place and on the current stream; CUDA graphs can capture it.
            None for a rank that is alone.
    """

    rank: int = 0
    reduce: Reduce | None = None

    def add(self, numbers: Tensor) -> None:
        """Replace ``numbers`` by their sums over the ranks. Whole numbers below 2⁵³ add up exactly in any order."""
        if self.reduce is not None:
            self.reduce(numbers, ReduceOp.SUM)

    def maximize(self, numbers: Tensor) -> None:
        """Replace ``numbers`` by their maxima over the ranks: on all the same bits."""
        if self.reduce is not None:
            self.reduce(numbers, ReduceOp.MAX)


ALONE: Final = Ranks()
