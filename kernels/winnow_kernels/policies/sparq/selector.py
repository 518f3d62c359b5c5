"""SparQ in the decode steps of a server on a GPU."""

from __future__ import annotations

from torch import Tensor

from winnow_kernels.cache import LayerCache
from winnow_kernels.decode.gpu_selector import Selector, note_budgets, rows_within
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.policies.sparq import gpu
from winnow_kernels.selection.gpu_top import TopBuffers, TopRows

KIND = "sparq"


class SparQSelector(Selector):
    """Keys by their products with the query's largest channels."""

    def __init__(self, step: Step) -> None:
        """``step`` is the largest that there will be."""
        _, kv_heads, width = step.slots.shape
        self._rows = rows_within(4 * kv_heads * (step.batch.longest + width + 6144), step.rows)
        [(_, part), *_] = step.parts(self._rows)
        self._buffers = TopBuffers.empty(part.batch, part.selection(0))
        self._ordered = True

    def begin(self, step: Step, *, ordered: bool) -> None:
        self._ordered = ordered

    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        for rows, part in step.parts(self._rows):
            own = part.parameters
            gpu.select(
                queries[rows],
                cache,
                part.batch,
                TopRows(own.own(KIND, "budget"), own.sinks, own.by_score),
                own.own(KIND, "channels"),
                part.selection(layer),
                self._buffers,
                any_by_score=self._ordered,
            )

    def finish(self, step: Step, statistics: Statistics) -> None:
        note_budgets(step, step.parameters.own(KIND, "budget"), statistics)
