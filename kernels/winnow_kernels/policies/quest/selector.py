"""Quest in the decode steps of a server on a GPU."""

from __future__ import annotations

from torch import Tensor

from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.gpu_selector import (
    Entry,
    Selector,
    Server,
    complete_pages,
    count_extended,
    rows_within,
    stage_of_pages,
)
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.request import Request
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.policies.quest import gpu
from winnow_kernels.policies.quest.gpu import QuestBuffers, QuestRows

KIND = "quest"


class QuestSelector(Selector):
    """Pages by the bounds of their keys."""

    def __init__(self, server: Server) -> None:
        self._bounds, self._scale = server.indexes[PageBounds], server.scale
        step = server.step
        sizes = (step.slots.shape[1], server.query_heads, step.batch.page_table.shape[1])
        self._rows = rows_within(QuestBuffers.bytes_of_row(*sizes), step.rows)
        self._buffers = QuestBuffers.empty(self._rows, *sizes, step.slots.device)

    def stage(self, request: Request, length: int) -> int:
        return stage_of_pages(request, length)

    def enter(self, request: Request, slot: int, context: Context) -> Entry:
        del request, slot
        return complete_pages(self._bounds, context)

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
            selection = part.selection(layer)
            gpu.select(layer, queries[rows], bounds, part.batch, of_rows, selection, self._buffers, self._scale)

    def finish(self, step: Step, statistics: Statistics) -> None:
        count_extended(step, step.parameters.own(KIND, "pages"), statistics)
