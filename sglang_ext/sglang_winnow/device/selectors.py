"""The selectors of a server on the device, one for each family: their scratch, and what they launch in a step."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_winnow.device.parameters import kept_positions, roles_of
from sglang_winnow.device.step import Step
from sglang_winnow.device.stored_positions import StoredPositions
from sglang_winnow.ranks import Ranks
from sglang_winnow.request_state import RequestState
from sglang_winnow.statistics import Field, Statistics
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.gpu import AttendBuffers
from winnow_kernels.batch import NO_MASS, WHOLE_TO_THE_END, ToldShares
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.gpu_rows import Parameter
from winnow_kernels.host_tensors import to_device
from winnow_kernels.indexes.clusters import ClusterIndex, clustered_until
from winnow_kernels.indexes.key_norms import KeyNorms
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.policies.delta import gpu as delta
from winnow_kernels.policies.delta.gpu import DeltaBuffers, DeltaRows
from winnow_kernels.policies.delta.parameters import Delta
from winnow_kernels.policies.quest import gpu as quest
from winnow_kernels.policies.quoka import gpu as quoka
from winnow_kernels.policies.quoka.gpu import QuokaBuffers
from winnow_kernels.policies.snapkv import gpu as stored_selection
from winnow_kernels.policies.snapkv.gpu import StoredRows
from winnow_kernels.policies.streaming_llm import gpu as streaming_llm
from winnow_kernels.policies.tactic.gpu import selection as tactic
from winnow_kernels.policies.tactic.gpu.selection import TacticBatch, TacticStatistics
from winnow_kernels.policies.tactic.gpu.state import TacticWorkspace
from winnow_kernels.policies.tactic.parameters import Tactic
from winnow_kernels.selection.gpu_pages import PageBuffers

SCRATCH_BYTES = 2**28
"""What a selector's scratch may take; larger batches are selected for in parts."""


@dataclass(frozen=True)
class Entry:
    """What a request's preparation cost.

    Attributes:
        built_tokens: tokens that an index was built of.
        read_bytes: of the KV cache; int64 [1] where it is a tensor.
    """

    built_tokens: int = 0
    read_bytes: Tensor | int = 0


class Selector(ABC):
    """What one family does in a decode step.

    ``enter`` runs on the host before a request's first sparse step in a request slot, and may wait for the device. All
    else is captured in CUDA graphs.
    """

    def enter(self, state: RequestState, slot: int, context: Context) -> Entry:
        """Prepare a request; ``context`` has its row alone."""
        del state, slot, context
        return Entry()

    def stage(self, state: RequestState, length: int) -> int:
        """Return a number that changes when a request must ``enter`` anew at a context of ``length`` tokens."""
        del state, length
        return 0

    def begin(self, step: Step, *, ordered: bool) -> None:  # noqa: B027
        """Do what is done once a step; ``ordered`` says whether the order of a selection may matter."""

    @abstractmethod
    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        """Write slots and counts of the family's rows; ``queries`` are [rows, query heads, head dim]."""

    def finish(self, step: Step, statistics: Statistics) -> None:  # noqa: B027
        """Add what only the family knows to the requests' statistics."""


class StreamingLLMSelector(Selector):
    """Sinks and window: the same in all layers."""

    def begin(self, step: Step, *, ordered: bool) -> None:
        del ordered
        streaming_llm.select(step.batch, step.parameters.streaming_llm, step.selection(0))
        # Every row's counts are those of whole contexts as yet, but for this family's.
        step.counts[1:] = step.counts[0]

    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        """Nothing is left to do."""


class QuestSelector(Selector):
    """Pages by the bounds of their keys."""

    def __init__(self, bounds: PageBounds, step: Step) -> None:
        """``step`` is the largest that there will be."""
        self._bounds = bounds
        pages = step.batch.page_table.shape[1]
        self._rows = _rows_within(8 * step.slots.shape[1] * pages, step.rows)
        self._buffers = PageBuffers.empty(self._rows, step.slots.shape[1], pages, step.slots.device)

    def stage(self, state: RequestState, length: int) -> int:
        return _stage_of_pages(state, length)

    def enter(self, state: RequestState, slot: int, context: Context) -> Entry:
        del state, slot
        return _complete_pages(self._bounds, context)

    def begin(self, step: Step, *, ordered: bool) -> None:
        del ordered
        self._bounds.extend(step.batch, step.parameters[Parameter.QUEST_PAGES])

    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        del cache
        for rows, part in step.parts(self._rows):
            bounds = self._bounds.bounds[layer]
            quest.select(
                layer, queries[rows], bounds, part.batch, part.parameters.quest, part.selection(layer), self._buffers
            )

    def finish(self, step: Step, statistics: Statistics) -> None:
        _count_extended(step, step.parameters[Parameter.QUEST_PAGES], statistics)


class StoredSelector(Selector):
    """What SnapKV and PyramidKV keep of their prompts."""

    def __init__(self, caches: Sequence[LayerCache], scale: float, requests: int, step: Step) -> None:
        """Room for ``requests`` request slots; ``step`` is the largest that there will be."""
        self._caches = caches
        self._scale = scale
        self._stored = StoredPositions(requests, len(caches), step.slots.device)
        empty = StoredRows.empty(step.rows, len(caches), 1, step.slots.device)
        self._offsets, self._kept = empty.offsets, empty.kept

    def enter(self, state: RequestState, slot: int, context: Context) -> Entry:
        kept = state.kept
        assert kept is not None
        votes = Meter(1, context.device)
        for layer, cache in enumerate(self._caches):
            if layer not in kept.kept:
                kept.vote(layer, cache, context.slots[0, : state.prompt_length], self._scale, votes)
        of_layers = [kept.kept[layer] for layer in range(len(self._caches))]
        self._stored.keep(state, slot, kept_positions(of_layers), [each.shape[1] for each in of_layers])
        return Entry(read_bytes=votes.read_bytes)

    def begin(self, step: Step, *, ordered: bool) -> None:
        del ordered
        torch.index_select(self._stored.offsets, 0, step.request_slots, out=self._offsets[: step.rows])
        torch.index_select(self._stored.kept, 0, step.request_slots, out=self._kept[: step.rows])

    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        del queries, cache
        rows = step.parameters.stored(self._stored.positions, self._offsets[: step.rows], self._kept[: step.rows])
        stored_selection.select(layer, step.batch, rows, step.selection(layer))


class DeltaSelector(Selector):
    """Pages that Δ-layers find. Those layers' attention is its own, too: ``attend_at``."""

    def __init__(
        self,
        layers: int,
        scale: float,
        query_heads: int,
        attend_buffers: AttendBuffers,
        requests: int,
        step: Step,
        ranks: Ranks,
    ) -> None:
        """Room for ``requests`` request slots; ``step`` is the largest that there will be."""
        device = step.slots.device
        self._scale = scale
        self._ranks = ranks
        self._attend_buffers = attend_buffers
        self._roles = torch.zeros(requests, layers, dtype=torch.int8, device=device)
        self._roles_of_rows = torch.zeros(layers * step.rows, dtype=torch.int8, device=device)
        self._rows = _rows_within(4 * step.batch.longest * (query_heads + 1), step.rows)
        [(_, part), *_] = step.parts(self._rows)
        self._buffers = DeltaBuffers.empty(part.batch, query_heads)

    def enter(self, state: RequestState, slot: int, context: Context) -> Entry:
        del context
        policy = state.policy.decode
        assert isinstance(policy, Delta)
        layers = self._roles.shape[1]
        roles = torch.tensor(roles_of(policy, layers), dtype=torch.int8)
        self._roles[slot] = to_device(roles, self._roles.device)
        return Entry()

    def begin(self, step: Step, *, ordered: bool) -> None:
        del ordered
        is_row = step.parameters[Parameter.DELTA_PAGES] > 0
        torch.mul(self._roles[step.request_slots].T, is_row, out=self._of(step).roles)
        delta.write_counts(step.batch, self._of(step), step.counts, step.slots.shape[2])

    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        """Nothing is left to do."""

    def attend_at(self, layer: int, queries: Tensor, cache: LayerCache, step: Step, output: Tensor) -> None:
        """Attend with the rows whose Δ-layer ``layer`` is, write their ``output``, and select for the layers behind."""
        everything = self._of(step)
        for rows, part in step.parts(self._rows):
            own = part.parameters.delta(everything.roles[:, rows].contiguous())
            delta.attend_and_score(
                layer,
                queries[rows],
                cache,
                part.batch,
                own,
                self._scale,
                self._attend_buffers,
                self._buffers,
                output[rows],
            )
            delta.score_tokens(layer, part.batch, own, self._attend_buffers, self._buffers)
            self._ranks.maximize(self._buffers.token_scores[: part.rows])
            delta.select(layer, part.batch, own, part.slots, self._buffers)

    def _of(self, step: Step) -> DeltaRows:
        layers = self._roles.shape[1]
        return step.parameters.delta(self._roles_of_rows[: layers * step.rows].view(layers, step.rows))


class QuokaSelector(Selector):
    """Keys by the cosine of their angle to the queries."""

    def __init__(self, norms: KeyNorms, step: Step) -> None:
        """``step`` is the largest that there will be."""
        self._norms = norms
        _, kv_heads, width = step.slots.shape
        self._rows = _rows_within(4 * kv_heads * (step.batch.longest + width + 6144), step.rows)
        [(_, part), *_] = step.parts(self._rows)
        self._buffers = QuokaBuffers.empty(part.batch, part.selection(0))
        self._ordered = True

    def stage(self, state: RequestState, length: int) -> int:
        return _stage_of_pages(state, length)

    def enter(self, state: RequestState, slot: int, context: Context) -> Entry:
        del state, slot
        return _complete_pages(self._norms, context)

    def begin(self, step: Step, *, ordered: bool) -> None:
        self._ordered = ordered
        self._norms.extend(step.batch, step.parameters[Parameter.QUOKA_BUDGET])

    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        for rows, part in step.parts(self._rows):
            quoka.select(
                queries[rows],
                cache,
                self._norms.reciprocals[layer],
                part.batch,
                part.parameters.quoka,
                part.selection(layer),
                self._buffers,
                any_by_score=self._ordered,
            )

    def finish(self, step: Step, statistics: Statistics) -> None:
        budgets = step.parameters[Parameter.QUOKA_BUDGET]
        _count_extended(step, budgets, statistics)
        noted = statistics.rows[:, Field.BUDGET]
        noted.index_copy_(
            0, step.request_slots, torch.where(budgets > 0, budgets.to(noted.dtype), noted[step.request_slots])
        )


class TacticSelector(Selector):
    """Clusters of keys, as many as hold each query head's share of the attention mass."""

    def __init__(
        self, clusters: ClusterIndex, scale: float, query_heads: int, requests: int, step: Step, ranks: Ranks
    ) -> None:
        """Room for ``requests`` request slots; ``step`` is the largest that there will be."""
        self._clusters = clusters
        self._scale = scale
        self._ranks = ranks
        device = step.slots.device
        kv_heads = step.slots.shape[1]
        spans = step.batch.longest // clusters.span
        self._entries = torch.zeros(requests, spans, dtype=torch.int32, device=device)
        self._clustered = torch.zeros(requests, dtype=torch.int32, device=device)
        self._batch = TacticBatch.empty(step.rows, spans, device)
        self._statistics = TacticStatistics.empty(step.rows, query_heads, device)
        one = TacticWorkspace.empty(1, query_heads, kv_heads, spans, clusters.span, device)
        self._rows = _rows_within(sum(t.nbytes for t in vars(one).values()), step.rows)
        self._workspace = TacticWorkspace.empty(self._rows, query_heads, kv_heads, spans, clusters.span, device)
        layers = step.counts.shape[0]
        self._layers = torch.arange(layers, dtype=torch.int32, device=device)[:, None]
        self._shares = torch.zeros(layers * step.rows, dtype=torch.float64, device=device)
        self._ordered = True
        self._holders: weakref.WeakSet[RequestState] = weakref.WeakSet()

    def stage(self, state: RequestState, length: int) -> int:
        return clustered_until(state.prompt_length, length, self._clusters.span)

    def enter(self, state: RequestState, slot: int, context: Context) -> Entry:
        policy = state.policy.decode
        assert isinstance(policy, Tactic)
        tokens = self.stage(state, int(context.lengths[0]))
        pages = self._clusters.generations.complete_pages(context, 0, tokens)
        held = self._clusters.hold(id(state), pages, policy.sinks)
        if state not in self._holders:
            self._holders.add(state)
            weakref.finalize(state, self._clusters.release, id(state)).atexit = False
        self._entries[slot, : len(held.entries)] = held.entries
        first = policy.sinks // self._clusters.span
        self._clustered[slot] = (first + len(held.entries)) * self._clusters.span
        return Entry(built_tokens=held.built_tokens)

    def begin(self, step: Step, *, ordered: bool) -> None:
        self._ordered = ordered
        torch.index_select(self._entries, 0, step.request_slots, out=self._batch.entries[: step.rows])
        torch.index_select(self._clustered, 0, step.request_slots, out=self._batch.clustered[: step.rows])
        self._statistics.capped[: step.rows].zero_()
        # Who attends to everything in a layer is believed nothing, and told that it has attended to all.
        told = self.told(step)
        told.beliefs.fill_(NO_MASS)
        told.shares.zero_()
        # A layer that attends to everything is to the kernels one of another family.
        full_layers = step.parameters[Parameter.TACTIC_FULL_LAYERS]
        is_full = self._layers < full_layers
        torch.mul(step.parameters.shares, ~is_full, out=self._shares_of(step))
        step.counts.masked_fill_(is_full[:, :, None], WHOLE_TO_THE_END)

    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        told = self.told(step)
        for rows, part in step.parts(self._rows):
            tactic.select(
                queries[rows],
                cache,
                self._clusters.layers[layer],
                part.batch,
                TacticBatch(
                    self._batch.entries[: step.rows][rows],
                    self._batch.clustered[: step.rows][rows],
                    part.parameters[Parameter.SINKS],
                    self._shares_of(step)[layer, rows],
                    part.parameters[Parameter.TACTIC_CAP],
                    part.parameters[Parameter.BY_SCORE],
                ),
                part.selection(layer),
                self._workspace,
                TacticStatistics(
                    ToldShares(told.beliefs[rows], told.shares[rows]), self._statistics.capped[: step.rows][rows]
                ),
                self._scale,
                in_order=self._ordered,
                capped=self._ordered,
            )

    def finish(self, step: Step, statistics: Statistics) -> None:
        acts = (step.parameters.shares > 0).double()
        table, slots = statistics.rows, step.request_slots
        share = self.told(step).shares.mean(1) * acts
        table[:, Field.ESTIMATED_SHARE].index_add_(0, slots, share)
        table[:, Field.ESTIMATES].index_add_(0, slots, acts * step.counts.shape[0])
        capped = self._statistics.capped[: step.rows]
        if self._ordered:
            # A step is capped if a head of any rank is.
            self._ranks.maximize(capped)
        capped = (capped > 0).double() * acts
        table[:, Field.CAPPED_STEPS].index_add_(0, slots, capped)

    def told(self, step: Step) -> ToldShares:
        """Return what attention is to tell the step's rows."""
        told = self._statistics.told
        return ToldShares(told.beliefs[: step.rows], told.shares[: step.rows])

    def _shares_of(self, step: Step) -> Tensor:
        layers = len(self._layers)
        return self._shares[: layers * step.rows].view(layers, step.rows)


def _rows_within(bytes_of_row: int, rows: int) -> int:
    """Return for how many rows there is scratch: a power of two, or all."""
    fit = max(1, SCRATCH_BYTES // bytes_of_row)
    return rows if fit >= rows else 1 << (fit.bit_length() - 1)


def _stage_of_pages(state: RequestState, length: int) -> int:
    """Return whether the pages of what was prefilled are those that it keeps.

    When SGLang has processed a prefill, it gives the request the radix cache's pages where another has cached the same
    tokens meanwhile. By then the first decode step may have begun.
    """
    return int(length > state.last_prefill + 1)


def _count_extended(step: Step, acts: Tensor, statistics: Statistics) -> None:
    """Count the pages of which ``extend`` has built the entries, in rows where ``acts`` is not 0."""
    page_size = step.batch.page_size
    begins = (step.batch.lengths % page_size == 1) & (acts > 0)
    built = statistics.rows[:, Field.INDEX_BUILT_TOKENS]
    built.index_add_(0, step.request_slots, begins.to(built.dtype) * page_size)


def _complete_pages(index: PageBounds | KeyNorms, context: Context) -> Entry:
    """Build the entries of a request's complete pages."""
    generations = index.generations
    # The page before the newest token's, if that begins one, is built with the step.
    pages = generations.complete_pages(context, 0, max(0, int(context.lengths[0]) - 2))
    return Entry(built_tokens=index.ensure(pages) * generations.page_size)
