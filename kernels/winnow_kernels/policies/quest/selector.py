"""Quest in the decode steps of a server on a GPU."""

from __future__ import annotations

from torch import Tensor

from winnow_kernels.cache import LayerCache
from winnow_kernels.decode.gpu_selector import PageIndexSelector, count_extended, rows_within
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.policies.quest import gpu
from winnow_kernels.policies.quest.gpu import QuestRows
from winnow_kernels.selection.gpu_pages import PageBuffers

KIND = "quest"


class QuestSelector(PageIndexSelector):
    """Pages by the bounds of their keys."""

    def __init__(self, bounds: PageBounds, step: Step) -> None:
        """``step`` is the largest that there will be."""
        super().__init__(bounds)
        self._bounds = bounds
        pages = step.batch.page_table.shape[1]
        self._rows = rows_within(8 * step.slots.shape[1] * pages, step.rows)
        self._buffers = PageBuffers.empty(self._rows, step.slots.shape[1], pages, step.slots.device)

    def begin(self, step: Step, *, ordered: bool) -> None:
        del ordered
        self._bounds.extend(step.batch, step.parameters.own(KIND, "pages"))

    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        del cache
        for rows, part in step.parts(self._rows):
            bounds = self._bounds.bounds[layer]
            parameters = part.parameters
            of_rows = QuestRows(
                parameters.own(KIND, "pages"),
                parameters.sinks,
                parameters.own(KIND, "full_layers"),
                parameters.by_score,
            )
            gpu.select(layer, queries[rows], bounds, part.batch, of_rows, part.selection(layer), self._buffers)

    def finish(self, step: Step, statistics: Statistics) -> None:
        count_extended(step, step.parameters.own(KIND, "pages"), statistics)
