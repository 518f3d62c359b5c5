"""Steps whose first layers attend to everything, as many layers as each request asks for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from winnow_kernels.attend.dense import attend_all
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.row_groups import attend_rows
from winnow_kernels.decode.step import DecodeStep

StepOfRows = TypeVar("StepOfRows", bound=DecodeStep)


class FullLayersStep(DecodeStep, Generic[StepOfRows]):
    """A step of a policy whose first layers are dense, and read to their end whatever early termination says.

    Attributes:
        steps_of_rows: the steps of some of the rows, which layers that are full for the others alone have needed.
    """

    def __init__(
        self, context: Context, scale: float, termination: Termination | None, full_layers: Sequence[int]
    ) -> None:
        """Take ``full_layers`` of each request; the others as in DecodeStep."""
        super().__init__(context, scale, termination)
        self.full_layers = full_layers
        self.steps_of_rows: dict[tuple[int, ...], StepOfRows] = {}
        self._contexts_of_rows: dict[tuple[int, ...], Context] = {}

    @abstractmethod
    def step_of(self, rows: list[int]) -> StepOfRows:
        """Return a new step of these rows alone."""

    def attend(self, layer: int, queries: Tensor, cache: LayerCache, meter: Meter) -> Tensor:
        full = [row for row, count in enumerate(self.full_layers) if layer < count]
        sparse = [row for row, count in enumerate(self.full_layers) if layer >= count]
        if not full:
            return super().attend(layer, queries, cache, meter)
        if not sparse:
            return attend_all(queries, self.context, cache, self.scale, meter)
        output = torch.empty_like(queries)
        key = tuple(sparse)
        if key not in self.steps_of_rows:
            self.steps_of_rows[key] = self.step_of(sparse)
            # How its tokens lie is looked up once for each context.
            self._contexts_of_rows[key] = self.context.rows(full)
        of_sparse, of_full = self.steps_of_rows[key], self._contexts_of_rows[key]
        attend_rows(full, lambda q, m: attend_all(q, of_full, cache, self.scale, m), queries, meter, output)
        attend_rows(sparse, lambda q, m: of_sparse.attend(layer, q, cache, m), queries, meter, output)
        return output
