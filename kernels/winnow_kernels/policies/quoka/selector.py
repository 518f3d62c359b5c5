"""QUOKA in the decode steps of a server on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow_kernels.cache import LayerCache
from winnow_kernels.decode.gpu_selector import (
    PageIndexSelector,
    Server,
    count_extended,
    note_budgets,
    rows_within,
)
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.policies.quoka import gpu
from winnow_kernels.selection.gpu_top import TopRows

KIND = "quoka"


class QuokaSelector(PageIndexSelector):
    """Keys by the cosine of their angle to the queries."""

    def __init__(self, server: Server) -> None:
        self._codes = server.indexes[KeyCodes]
        super().__init__(self._codes)
        step, cache = server.step, server.caches[0]
        shape = (cache.kv_heads, cache.head_dim, step.batch.longest, step.slots.shape[2])
        self._rows = rows_within(gpu.Scratch.empty(1, *shape, torch.device("meta")).bytes, step.rows)
        self._scratch = gpu.Scratch.empty(self._rows, *shape, step.slots.device)
        self._ordered = True

    def begin(self, step: Step, *, ordered: bool) -> None:
        self._ordered = ordered
        self._codes.extend(step.batch, step.parameters.own(KIND, "budget"))

    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        for rows, part in step.parts(self._rows):
            own = part.parameters
            gpu.select(
                layer,
                queries[rows],
                cache,
                self._codes,
                part.batch,
                TopRows(own.own(KIND, "budget"), own.sinks, own.by_score),
                part.selection(layer),
                self._scratch,
                any_by_score=self._ordered,
            )

    def finish(self, step: Step, statistics: Statistics) -> None:
        budgets = step.parameters.own(KIND, "budget")
        count_extended(step, budgets, statistics)
        note_budgets(step, budgets, statistics)
