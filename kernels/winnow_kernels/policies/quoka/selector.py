"""QUOKA in the decode steps of a server on a GPU."""

from __future__ import annotations

from torch import Tensor

from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.gpu_selector import (
    Entry,
    Selector,
    complete_pages,
    count_extended,
    note_budgets,
    rows_within,
    stage_of_pages,
)
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.request import Request
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.indexes.key_norms import KeyNorms
from winnow_kernels.policies.quoka import gpu
from winnow_kernels.selection.gpu_top import TopBuffers, TopRows

KIND = "quoka"


class QuokaSelector(Selector):
    """Keys by the cosine of their angle to the queries."""

    def __init__(self, norms: KeyNorms, step: Step) -> None:
        """``step`` is the largest that there will be."""
        self._norms = norms
        _, kv_heads, width = step.slots.shape
        self._rows = rows_within(4 * kv_heads * (step.batch.longest + width + 6144), step.rows)
        [(_, part), *_] = step.parts(self._rows)
        self._buffers = TopBuffers.empty(part.batch, part.selection(0))
        self._ordered = True

    def stage(self, request: Request, length: int) -> int:
        return stage_of_pages(request, length)

    def enter(self, request: Request, slot: int, context: Context) -> Entry:
        del request, slot
        return complete_pages(self._norms, context)

    def begin(self, step: Step, *, ordered: bool) -> None:
        self._ordered = ordered
        self._norms.extend(step.batch, step.parameters.own(KIND, "budget"))

    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        for rows, part in step.parts(self._rows):
            own = part.parameters
            gpu.select(
                queries[rows],
                cache,
                self._norms.reciprocals[layer],
                part.batch,
                TopRows(own.own(KIND, "budget"), own.sinks, own.by_score),
                part.selection(layer),
                self._buffers,
                any_by_score=self._ordered,
            )

    def finish(self, step: Step, statistics: Statistics) -> None:
        budgets = step.parameters.own(KIND, "budget")
        count_extended(step, budgets, statistics)
        note_budgets(step, budgets, statistics)
