"""The requests of a decode batch that share a policy, as its reference takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.cache import Context
from winnow_kernels.contract.fields import Parameters
from winnow_kernels.decode.request import Request
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.indexes.pool_indexes import Indexes

P = TypeVar("P", bound=Parameters)


@dataclass(frozen=True)
class PolicyBatch:
    """The requests of a batch whose decode policies are of one kind.

    Attributes:
        context: where their tokens lie.
        lengths: the contexts' lengths, on the host.
        requests: one for each.
        scale: what scores are multiplied by.
        termination: thresholds of those that have any.
        indexes: of the server.
        table_rows: int64 [rows], their rows in the statistics.
        statistics: of the server.
    """

    context: Context
    lengths: Sequence[int]
    requests: Sequence[Request]
    scale: float
    termination: Termination | None
    indexes: Indexes
    table_rows: Tensor
    statistics: Statistics

    def parameters(self, kind: type[P]) -> list[P]:
        """Return the requests' parameters, all of which are of one class."""
        return [own for request in self.requests if isinstance(own := request.decode, kind)]

    def count_built(self, tokens: Sequence[int]) -> None:
        """Count for each request the tokens of which it was the first to need an index."""
        amounts = torch.tensor(tokens, dtype=torch.float64, device=self.table_rows.device)
        self.statistics.add(self.table_rows, Field.INDEX_BUILT_TOKENS, amounts)
