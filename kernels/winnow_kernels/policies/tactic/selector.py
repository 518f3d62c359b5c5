"""Tactic in the decode steps of a server on a GPU."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from winnow_kernels.batch import WHOLE_TO_THE_END
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.gpu_selector import Entry, Selector, count_capped, count_shares, rows_within
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.ranks import Ranks
from winnow_kernels.decode.request import Request
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.indexes.clusters import ClusterIndex, clustered_until
from winnow_kernels.policies.tactic.gpu import selection
from winnow_kernels.policies.tactic.gpu.state import TacticBatch, TacticStatistics, TacticWorkspace
from winnow_kernels.policies.tactic.parameters import Tactic

KIND = "tactic"


class TacticSelector(Selector):
    """Clusters of keys, as many as hold each query head's share of the attention mass."""

    reports_shares = True

    def __init__(
        self, clusters: ClusterIndex, scale: float, query_heads: int, requests: int, step: Step, ranks: Ranks
    ) -> None:
        """Room for ``requests`` request slots; ``step`` is the largest that there will be."""
        self._clusters = clusters
        self._scale = scale
        self._ranks = ranks
        device = step.slots.device
        kv_heads = step.slots.shape[1]
        spans = -(-step.batch.longest // clusters.span)
        self._entries = torch.zeros(requests, spans, dtype=torch.int32, device=device)
        self._clustered = torch.zeros(requests, dtype=torch.int32, device=device)
        self._batch = TacticBatch.empty(step.rows, spans, device)
        self._capped = torch.zeros(step.rows, dtype=torch.int32, device=device)
        one = TacticWorkspace.empty(1, query_heads, kv_heads, spans, clusters.span, device)
        self._rows = rows_within(one.bytes, step.rows)
        self._workspace = TacticWorkspace.empty(self._rows, query_heads, kv_heads, spans, clusters.span, device)
        layers = step.counts.shape[0]
        self._layers = torch.arange(layers, dtype=torch.int32, device=device)[:, None]
        self._shares = torch.zeros(layers * step.rows, dtype=torch.float64, device=device)
        self._ordered = True
        self._holders: weakref.WeakSet[Request] = weakref.WeakSet()

    def stage(self, request: Request, length: int) -> int:
        return clustered_until(request.prompt_length, length, self._clusters.piece)

    def enter(self, request: Request, slot: int, context: Context) -> Entry:
        policy = request.decode
        assert isinstance(policy, Tactic)
        tokens = self.stage(request, int(context.lengths[0]))
        pages = self._clusters.generations.complete_pages(context, 0, tokens)
        held = self._clusters.hold(id(request), pages, policy.sinks)
        if request not in self._holders:
            self._holders.add(request)
            weakref.finalize(request, self._clusters.release, id(request)).atexit = False
        self._entries[slot, : len(held.entries)] = held.entries
        self._clustered[slot] = held.end
        return Entry(built_tokens=held.built_tokens)

    def begin(self, step: Step, *, ordered: bool) -> None:
        self._ordered = ordered
        torch.index_select(self._entries, 0, step.request_slots, out=self._batch.entries[: step.rows])
        torch.index_select(self._clustered, 0, step.request_slots, out=self._batch.clustered[: step.rows])
        self._capped[: step.rows].zero_()
        # A layer that attends to everything is to the kernels one of another kind.
        full_layers = step.parameters.own(KIND, "full_layers")
        is_full = self._layers < full_layers
        acts = step.parameters.acting(KIND)
        torch.mul(step.parameters.shares, acts & ~is_full, out=self._shares_of(step))
        step.counts.masked_fill_(is_full[:, :, None], WHOLE_TO_THE_END)

    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        for rows, part in step.parts(self._rows):
            selection.select(
                queries[rows],
                cache,
                self._clusters.layers[layer],
                part.batch,
                TacticBatch(
                    self._batch.entries[: step.rows][rows],
                    self._batch.clustered[: step.rows][rows],
                    part.parameters.sinks,
                    self._shares_of(step)[layer, rows],
                    part.parameters.own(KIND, "cap"),
                    part.parameters.by_score,
                ),
                part.selection(layer),
                self._workspace,
                TacticStatistics(part.reported, self._capped[: step.rows][rows]),
                self._scale,
                in_order=self._ordered,
                capped=self._ordered,
            )

    def finish(self, step: Step, statistics: Statistics) -> None:
        acts = step.parameters.acting(KIND)
        count_shares(step, acts, statistics)
        capped = self._capped[: step.rows]
        if self._ordered:
            # A step is capped if a head of any rank is.
            self._ranks.maximize(capped)
        count_capped(step, capped, acts, statistics)

    def _shares_of(self, step: Step) -> Tensor:
        layers = len(self._layers)
        return self._shares[: layers * step.rows].view(layers, step.rows)
