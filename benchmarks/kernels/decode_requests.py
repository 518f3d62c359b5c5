"""Requests in the middle of decoding, as a CUDA server has them, without the server: for timing a layer by itself."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

import torch
from torch import Tensor

from benchmarks.kernels.captured_keys import CapturedKeys
from benchmarks.kernels.tactic_keys import make_keys
from sglang_winnow.decode_plan import DecodePlan
from sglang_winnow.device.decode import DeviceDecode, Variant
from sglang_winnow.request_policy import kept_by
from sglang_winnow.request_state import RequestState
from winnow_kernels.attend.gpu import AttendBuffers, attend
from winnow_kernels.batch import Count
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.gpu_selector import Server
from winnow_kernels.decode.gpu_step import Step, StepBuffers
from winnow_kernels.decode.ranks import ALONE
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.indexes.clusters import SPAN
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.indexes.pool_indexes import Indexes
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.declarations import LAYOUT, kinds_of, selectors_of
from winnow_kernels.policies.lowbit_top_p.selector import CodedSelector
from winnow_kernels.policies.snapkv.reference import SnapKVState
from winnow_kernels.policies.tactic.gpu.selection import selection_width

PAGE_SIZE: Final = 16
_STEPS: Final = 4
# Of a step's query in the next one's; the rest is noise, and its length stays as it is.
_KEPT: Final = 0.9


@dataclass(frozen=True)
class Heads:
    """The attention heads of a layer."""

    query: int
    kv: int
    dim: int

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)


class Contexts:
    """A KV cache of some layers with contexts of one length in it, their pages in random order, and queries.

    Keys and queries are those of ``tactic_keys``: one context's keys, which all rows and layers have in pages of their
    own, and a query for each row. From step to step queries drift. Or both are a model's: then layers differ, and rows
    are some steps apart. Values are random.

    Attributes:
        heads: of every layer.
        length: tokens of each context, with the one that is being decoded.
        caches: of each layer.
        table: int32 [request slots, positions]; the KV slot of each token. Slot 0 is that of padding.
        request_slots: int64 [rows].
        queries: [rows, query heads, head dim]; of the first step, in the first layer.
    """

    def __init__(
        self,
        heads: Heads,
        length: int,
        rows: int,
        layers: int,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
        captured: CapturedKeys | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """``dtype`` is that of queries, and of keys and values if they have no ``cache_dtype`` of their own."""
        self.heads = heads
        self.length = length
        generator = torch.Generator(device).manual_seed(seed)
        pages = -(-length // PAGE_SIZE)
        order = 1 + torch.randperm(rows * pages, generator=generator, device=device).view(rows, pages, 1)
        slots = (order * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)).flatten(1)
        self.table = torch.zeros(rows + 1, pages * PAGE_SIZE, dtype=torch.int32, device=device)
        self.table[1:] = slots
        self.request_slots = torch.arange(1, rows + 1, device=device)
        if captured is None:
            made = make_keys(
                length, rows, heads.kv, heads.query // heads.kv, heads.dim, seed=seed, device=device, dtype=dtype
            )
            context_keys = made.keys[None]
            self._queries = drifting(made.queries, generator)[None]
        else:
            context_keys = captured.tiled(length).to(device, dtype)
            self._queries = captured.queries_of_rows(rows).to(device, dtype).contiguous()
        self.queries = self.queries_of(0, 0)
        self.caches = []
        for layer in range(layers):
            shape = ((rows * pages + 1) * PAGE_SIZE, heads.kv, heads.dim)
            keys = torch.zeros(shape, dtype=dtype, device=device)
            keys[slots[:, :length]] = context_keys[layer % len(context_keys)]
            values = torch.randn(shape, dtype=dtype, generator=generator, device=device)
            self.caches.append(LayerCache(*(vectors.to(cache_dtype or dtype) for vectors in (keys, values))))

    def queries_of(self, layer: int, step: int) -> Tensor:
        """Return the queries of a layer in a step, [rows, query heads, head dim]."""
        return self._queries[layer % len(self._queries), step]

    @property
    def steps(self) -> int:
        """How many steps there are queries of."""
        return int(self._queries.shape[1])

    @property
    def rows(self) -> int:
        return len(self.request_slots)

    @property
    def layers(self) -> int:
        return len(self.caches)

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def kv_cache_dtype(self) -> str:
        """Of keys and values, as torch calls it."""
        return str(self.caches[0].keys.dtype).removeprefix("torch.")

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V that dense attention reads in a layer."""
        return 2 * self.rows * self.length * self.heads.kv * self.caches[0].vector_bytes

    def lengths(self) -> Tensor:
        """Return the contexts' lengths, int32 [rows]."""
        return torch.full((self.rows,), self.length, dtype=torch.int32, device=self.device)

    def states(self, *policies: AttentionPolicy) -> list[RequestState]:
        """Return a request for each row, of ``policies`` in turn, about to make the first step after its prompt.

        What SnapKV keeps is drawn at random, the same in all layers: reading it takes as long.
        """
        states = [RequestState(policies[row % len(policies)], self.length - 1) for row in range(self.rows)]
        for row, state in enumerate(states):
            state.kept = kept_by(state, range(self.layers))
            if isinstance(state.kept, SnapKVState):
                generator = torch.Generator(self.device).manual_seed(row)
                shape = (self.heads.kv, state.kept.observation.first_position)
                votes = torch.rand(shape, generator=generator, device=self.device)
                for layer in range(self.layers):
                    state.kept.keep(layer, votes)
        return states


class Requests:
    """One request in each row, prepared for its first decode step, on the device.

    Attributes:
        contexts: of the requests.
        decode: makes the steps.
        step: the present one.
        output: [rows, query heads, head dim]; of the layer that attended last.
        attend_buffers: of attention.
        statistics: of all request slots.
    """

    def __init__(self, contexts: Contexts, *policies: AttentionPolicy, ordered: bool = False) -> None:
        """Rows have ``policies`` in turn. With ``ordered`` the step launches what early termination needs anyway."""
        device, heads = contexts.device, contexts.heads
        self.contexts = contexts
        self.output = torch.empty_like(contexts.queries)
        self.statistics = Statistics(len(contexts.table), device)
        self.attend_buffers = AttendBuffers.empty(contexts.rows, heads.query, contexts.caches[0])
        # Dense rows run here together with sparse ones only: in a step for StreamingLLM that has no row of its own.
        self._kinds = kinds_of({policy.decode.policy for policy in policies}) or kinds_of(["streaming_llm"])
        self._ordered = ordered
        self._indexes = Indexes(contexts.caches, PAGE_SIZE, device)
        longest = contexts.table.shape[1]
        buffers = StepBuffers(
            LAYOUT,
            contexts.rows,
            longest,
            PAGE_SIZE,
            contexts.layers,
            heads.query,
            heads.kv,
            selection_width(longest),
            device,
        )
        server = Server(
            contexts.caches,
            heads.scale,
            heads.query,
            self._indexes,
            self.attend_buffers,
            len(contexts.table),
            buffers.largest,
            ALONE,
        )
        self._selectors = selectors_of(self._kinds, server)
        self.decode = DeviceDecode(
            contexts.caches, heads.scale, contexts.table, buffers, self.attend_buffers, self._selectors, self.statistics
        )
        self.step: Step = buffers.largest
        self.serve(*policies)

    def serve(self, *policies: AttentionPolicy) -> None:
        """Prepare requests of ``policies``, of the kinds that there are selectors for."""
        contexts = self.contexts
        states = contexts.states(*policies)
        lengths = [contexts.length] * contexts.rows
        needed = self.decode.needed(states, lengths)
        variant: Variant = replace(needed, kinds=self._kinds, ordered=self._ordered or needed.ordered)
        self.decode.prepare(
            variant, states, contexts.request_slots.tolist(), lengths, contexts.request_slots, contexts.lengths()
        )
        # A request's slot is its own for as long as it lives.
        self._states = states
        self.decode.begin()

    @property
    def selects_by_codes(self) -> bool:
        return any(isinstance(selector, CodedSelector) for selector in self._selectors.values())

    @property
    def walk(self) -> list[int]:
        """Steps to be timed, each beside its neighbour: more than one where a step begins with what the last found."""
        if not self.selects_by_codes:
            return [0]
        return there_and_back(min(_STEPS, self.contexts.steps))

    def attend(self, layer: int, step: int = 0) -> None:
        """Do all that a layer takes."""
        self.decode.attend(layer, self.contexts.queries_of(layer, step), self.output)

    def select(self, layer: int, step: int = 0) -> None:
        """Do what comes before attention."""
        queries = self.contexts.queries_of(layer, step)
        for selector in self._selectors.values():
            selector.select(layer, queries, self.contexts.caches[layer], self.step)

    def build(self) -> None:
        """Write the codes of all keys, in all layers."""
        self._indexes[KeyCodes].entries.build(self._pages)

    def missed(self, layers: Sequence[int]) -> tuple[float, float]:
        """Return how often selections of the only policy begin at the wrong place in consecutive steps.

        Returns:
            The share of layers and steps in which tokens are marked again; and that of the heads for which they are
            counted again.
        """
        [selector] = self._selectors.values()
        assert isinstance(selector, CodedSelector)
        found = []
        for layer in layers:
            # What the first step looks like to those behind it.
            self.select(layer, 0)
            for step in range(1, self.contexts.steps):
                self.select(layer, step)
                found.append(selector.missed(self.contexts.rows))
        marked, counted = zip(*found, strict=True)
        return statistics.fmean(marked), statistics.fmean(counted)

    def attend_alone(self, layer: int, step: int = 0) -> None:
        """Attend to what the last layer selected."""
        contexts, own = self.contexts, self.step
        attend(
            contexts.queries_of(layer, step),
            contexts.caches[layer],
            own.batch,
            own.selection(layer),
            contexts.heads.scale,
            own.parameters.thresholds if self.decode.variant.ordered else None,
            self.attend_buffers,
            self.output,
        )

    @property
    def _pages(self) -> Tensor:
        return (self.contexts.table[1:, ::PAGE_SIZE] // PAGE_SIZE).flatten().long()

    def once_a_step(self) -> None:
        """Do what a step does beside its layers."""
        self.decode.begin()
        self.decode.finish()

    def counts(self, layers: Sequence[int]) -> dict[Count, float]:
        """Run layers, and return what each of them read, on average over steps; all rows together."""
        counts = self.step.batch.counts
        counts.zero_()
        for layer, step in product(layers, self.walk):
            self.attend(layer, step)
        sums = counts.sum(0).tolist()
        return {count: sums[count] / (len(layers) * len(self.walk)) for count in Count}


def reference(contexts: Contexts, policy: AttentionPolicy) -> tuple[list[Tensor], Statistics]:
    """Return what torch computes for the same requests, layer by layer, and what it counts."""
    statistics = Statistics(len(contexts.table), contexts.device)
    indexes = Indexes(contexts.caches, PAGE_SIZE, contexts.device)
    slots = contexts.table[1:, : contexts.length].long()
    plan = DecodePlan(
        Context.of(slots, contexts.lengths().long(), contexts.caches[0].slots),
        [contexts.length] * contexts.rows,
        contexts.request_slots,
        contexts.states(policy),
        contexts.heads.scale,
        indexes,
        statistics,
    )
    attend_in = partial(plan.attend, scale=contexts.heads.scale, window=None)
    outputs = [attend_in(layer, contexts.queries, cache) for layer, cache in enumerate(contexts.caches)]
    plan.finish()
    return outputs, statistics


def drifting(queries: Tensor, generator: torch.Generator) -> Tensor:
    """Return ``queries``, [rows, query heads, head dim], and how they drift in the next steps, [steps, …]."""
    steps = [queries.float()]
    for _ in range(_STEPS - 1):
        noise = torch.randn(queries.shape, generator=generator, device=queries.device)
        noise *= steps[-1].norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        steps.append(_KEPT * steps[-1] + (1 - _KEPT**2) ** 0.5 * noise)
    return torch.stack(steps).to(queries.dtype)


def there_and_back(count: int) -> list[int]:
    """Return the numbers below ``count``, up and down again: followed by itself, neighbours stay neighbours."""
    return [*range(count), *range(count - 2, 0, -1)]


def measured_length(context: int) -> int:
    """Return how long a context of nominally ``context`` tokens is: as many as on average lie behind the last span.

    At a whole number of spans Tactic would have clusters of all tokens but the newest, which is rare.
    """
    return context - SPAN // 2 if context > SPAN else context
