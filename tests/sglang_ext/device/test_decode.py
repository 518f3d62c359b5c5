"""Decode on the device: mixed batches, step after step, as the torch path computes and counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sglang_winnow.crossover import acting_at_every_length
from sglang_winnow.decode_plan import DecodePlan
from sglang_winnow.device.decode import DeviceDecode, Variant
from sglang_winnow.device.variants import variant_for, variants_of
from sglang_winnow.request_policy import kept_by
from sglang_winnow.request_state import RequestState
from tests.kernels.caches import random_cache, random_softmax
from tests.policy_rows import small_policies
from winnow_kernels.attend.gpu import AttendBuffers
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.gpu_audit import StepAudit
from winnow_kernels.decode.gpu_selector import Selector
from winnow_kernels.decode.gpu_selector import Server as SelectorServer
from winnow_kernels.decode.gpu_step import StepBuffers
from winnow_kernels.decode.ranks import ALONE, Ranks
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.indexes.clusters import ClusterIndex
from winnow_kernels.indexes.pool_indexes import Indexes
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.declarations import KINDS, LAYOUT, selectors_of
from winnow_kernels.softmax import Softmax

# Products of 8-bit numbers on tensor cores need 32 bytes of a key's means, which are half as many as its channels.
LAYERS, KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE = 3, 2, 2, 64, 16
LONGEST = 256
SPAN = 64
STEPS = 2

TERMINATION = {"scale": 0.3, "direction": 0.3, "patience": 1}
POLICIES: Mapping[str, Mapping[str, Any]] = small_policies() | {
    "dense, terminated": {"early_termination": TERMINATION},
    "quest, terminated": {
        "decode": {"policy": "quest", "budget": 128, "full_layers": 0},
        "early_termination": TERMINATION,
    },
    "tactic, capped": {"decode": {"policy": "tactic", "p": 0.9, "max_tokens": 80, "full_layers": 0}},
    "tactic, no sinks": {"decode": {"policy": "tactic", "p": 0.5, "full_layers": 0, "sinks": 0}},
    "tactic, more sinks than a span": {"decode": {"policy": "tactic", "p": 0.4, "full_layers": 1, "sinks": 70}},
    "quoka by ratio": {"decode": {"policy": "quoka", "budget_ratio": 0.3}},
    "quest, verified": {"decode": {"policy": "quest", "budget": 64, "full_layers": 0}, "verify": {}},
    "verified_pages": {"decode": {"policy": "verified_pages", "budget": 64, "recency": 16}, "verify": {}},
    "streaming_llm, verified": {"decode": {"policy": "streaming_llm", "window": 40}, "verify": {"draft_tokens": 1}},
}


# One for each policy, and that of padding.
REQUEST_SLOTS = len(POLICIES) + 1


@pytest.fixture(autouse=True)
def policies_act_at_every_length() -> Iterator[None]:
    with acting_at_every_length():
        yield


class Shape(NamedTuple):
    """Of a model's attention."""

    kv_heads: int
    group: int
    head_dim: int

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


SHAPE = Shape(KV_HEADS, GROUP, HEAD_DIM)


@dataclass(frozen=True)
class Share:
    """What one of several ranks has of every layer's heads."""

    kv_heads: slice
    query_heads: slice
    ranks: Ranks


EVERYTHING = Share(slice(None), slice(None), ALONE)


@dataclass(frozen=True)
class Layers:
    """Of which a KV cache is, by their numbers in the model; those of ``windows`` have a sliding window."""

    numbers: Sequence[int] = range(LAYERS)
    windows: Mapping[int, int] = field(default_factory=dict)

    @property
    def full(self) -> list[int]:
        """The places of the others."""
        return [place for place, number in enumerate(self.numbers) if number not in self.windows]


class Server:
    """A KV cache with requests in it; what both ways of computing have of their own is made twice."""

    def __init__(
        self,
        names: Sequence[str],
        lengths: Sequence[int],
        device: torch.device,
        share: Share = EVERYTHING,
        stored: Callable[[Tensor], Tensor] = Tensor.clone,
        shape: Shape = SHAPE,
        layers: Layers = Layers(),
        policies: Mapping[str, Mapping[str, Any]] = POLICIES,
        softmax: str = "plain",
    ) -> None:
        """``stored`` makes of keys and values what the cache has of them; ``softmax`` is a kind of ``SOFTMAXES``."""
        self.device = device
        self.share = share
        self.shape = shape
        self.layers = layers
        self.policies = policies
        self.softmax = softmax
        self.lengths = list(lengths)
        pages = LONGEST // PAGE_SIZE
        slots = (len(names) * pages + 1) * PAGE_SIZE
        self.caches = [
            LayerCache(
                *(stored(half[:, self.share.kv_heads]).contiguous().to(device) for half in (cache.keys, cache.values)),
                windowed=number in layers.windows,
                softmax=self.softmax_of(number),
            )
            for number in layers.numbers
            for cache in [random_cache(slots, shape.kv_heads, shape.head_dim, seed=number)]
        ]
        order = 1 + torch.randperm(len(names) * pages, generator=torch.Generator().manual_seed(1))
        of_pages = order.view(len(names), pages, 1) * PAGE_SIZE + torch.arange(PAGE_SIZE)
        self.table = torch.zeros(REQUEST_SLOTS, LONGEST, dtype=torch.int32, device=device)
        self.request_slots = torch.arange(1, len(names) + 1, device=device)
        self.table[self.request_slots] = of_pages.flatten(1).int().to(device)
        self.statistics = Statistics(REQUEST_SLOTS, device, self.share.ranks)
        self.indexes = Indexes(self.caches, PAGE_SIZE, device)
        self.indexes.made[ClusterIndex] = ClusterIndex(
            self.caches, self.indexes.generations, SPAN, capacity=slots // SPAN
        )
        self.states = [self._state(name, length) for name, length in zip(names, lengths, strict=True)]

    def softmax_of(self, layer: int) -> Softmax:
        softmax = random_softmax(self.softmax, self.shape.query_heads, seed=layer)
        sinks = softmax.sink_logits
        own = None if sinks is None else sinks[self.share.query_heads].contiguous().to(self.device)
        return replace(softmax, sink_logits=own)

    def _state(self, name: str, length: int) -> RequestState:
        state = RequestState(AttentionPolicy.model_validate(self.policies[name]), length - 1)
        state.begin_prefill(length - 1)
        state.kept = kept_by(state, self.layers.full)
        if state.kept is not None:
            for layer in self.layers.full:
                generator = torch.Generator().manual_seed(self.layers.numbers[layer])
                queries = torch.randn((length - 1, self.shape.query_heads, self.shape.head_dim), generator=generator)
                state.kept.record(layer, self.own(queries), 0)
        return state

    def own(self, queries: Tensor) -> Tensor:
        return queries[:, self.share.query_heads].contiguous().to(self.device)

    def swap(self) -> None:
        """Exchange the pages of the first two requests, as if both had been retracted and prefilled anew."""
        first, second = self.table[1].long(), self.table[2].long()
        for cache in self.caches:
            for half in (cache.keys, cache.values):
                half[torch.cat((first, second))] = half[torch.cat((second, first))]
        self.table[1], self.table[2] = second, first
        self.indexes.generations.written(torch.cat((first, second)))
        # The token that the last step gave is prefilled, too.
        self.lengths = [length + 2 for length in self.lengths]
        for state, length in zip(self.states, self.lengths, strict=True):
            state.begin_prefill(length - 1)

    def grow(self) -> None:
        written = self.table[self.request_slots, torch.tensor(self.lengths)].long()
        self.lengths = [length + 1 for length in self.lengths]
        self.indexes.generations.written(written)


def every_selector(server: SelectorServer) -> Mapping[str, Selector]:
    return selectors_of(KINDS, server)


def device_decode(
    server: Server, selectors_for: Callable[[SelectorServer], Mapping[str, Selector]] = every_selector
) -> DeviceDecode:
    device = server.device
    query_heads = len(range(server.shape.query_heads)[server.share.query_heads])
    kv_heads = server.caches[0].kv_heads
    buffers = StepBuffers(LAYOUT, REQUEST_SLOTS, LONGEST, PAGE_SIZE, LAYERS, query_heads, kv_heads, LONGEST, device)
    attend_buffers = AttendBuffers.empty(REQUEST_SLOTS, query_heads, server.caches[0])
    own = SelectorServer(
        server.caches,
        server.shape.scale,
        query_heads,
        server.indexes,
        attend_buffers,
        REQUEST_SLOTS,
        buffers.largest,
        server.share.ranks,
    )
    audit = StepAudit(REQUEST_SLOTS, query_heads, server.caches[0], attend_buffers)
    selectors = selectors_for(own)
    return DeviceDecode(
        server.caches, server.shape.scale, server.table, buffers, attend_buffers, selectors, server.statistics, audit
    )


VARIANTS = variants_of(KINDS, (), LAYERS, delta_layers=(1,), audits=True)


def queries_of(server: Server, step: int, layer: int) -> Tensor:
    shape = (len(server.states), server.shape.query_heads, server.shape.head_dim)
    generator = torch.Generator().manual_seed(100 * step + layer)
    return server.own(torch.randn(shape, generator=generator))


def by_torch(server: Server, step: int) -> list[Tensor]:
    lengths = torch.tensor(server.lengths, device=server.device)
    slots = server.table[server.request_slots, : max(server.lengths)].long()
    plan = DecodePlan(
        Context.of(slots, lengths, server.caches[0].slots),
        server.lengths,
        server.request_slots,
        server.states,
        server.shape.scale,
        server.indexes,
        server.statistics,
    )
    outputs = [
        plan.attend(layer, queries_of(server, step, layer), cache, server.shape.scale, server.layers.windows.get(layer))
        for layer, cache in enumerate(server.caches)
    ]
    plan.finish()
    return outputs


def on_device(
    server: Server, decode: DeviceDecode, step: int, padding: int, variants: Mapping[str, Variant] = VARIANTS
) -> list[Tensor]:
    needed = decode.needed(server.states, server.lengths)
    variant = variants[variant_for(needed, variants)]
    rows = len(server.states)
    request_slots = torch.nn.functional.pad(server.request_slots, (0, padding))
    lengths = torch.nn.functional.pad(torch.tensor(server.lengths, device=server.device), (0, padding), value=1)
    decode.prepare(variant, server.states, request_slots[:rows].tolist(), server.lengths, request_slots, lengths)
    decode.begin()
    outputs = []
    for layer in range(LAYERS):
        queries = torch.nn.functional.pad(queries_of(server, step, layer), (0, 0, 0, 0, 0, padding))
        output = torch.empty_like(queries)
        if not variant.is_dense:
            decode.attend(layer, queries, output)
            outputs.append(output[:rows])
    decode.finish()
    return outputs


def of_field(field: Field, difference: str) -> str:
    return f"{field.name}: {difference}"


def in_8_bits(vectors: Tensor) -> Tensor:
    return vectors.to(torch.float8_e4m3fn)


def compare(
    names: Sequence[str],
    lengths: Sequence[int],
    device: torch.device,
    padding: int = 0,
    shape: Shape = SHAPE,
    stored: Callable[[Tensor], Tensor] = Tensor.clone,
) -> None:
    torch_server, device_server = (Server(names, lengths, device, shape=shape, stored=stored) for _ in range(2))
    decode = device_decode(device_server)
    for step in range(STEPS):
        expected = by_torch(torch_server, step)
        for layer, output in enumerate(on_device(device_server, decode, step, padding)):
            torch.testing.assert_close(output, expected[layer], rtol=1e-4, atol=1e-4)
        torch_server.grow()
        device_server.grow()
    wanted, got = (server.statistics.rows[1 : len(names) + 1].cpu() for server in (torch_server, device_server))
    for counted in Field:
        # A GPU's exponentials are approximate: shares that were estimated differ by up to 3e-5 of themselves.
        tolerance = 5e-5 if counted == Field.ESTIMATED_SHARE else 1e-5
        torch.testing.assert_close(
            got[:, counted], wanted[:, counted], rtol=tolerance, atol=1e-5, msg=partial(of_field, counted)
        )


@pytest.mark.full
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("stored", [Tensor.clone, in_8_bits])
def test_a_policy_alone(name: str, stored: Callable[[Tensor], Tensor], device: torch.device) -> None:
    compare([name, name, "dense"], [208, 143, 90], device, padding=1, stored=stored)


@pytest.mark.parametrize("stored", [Tensor.clone, pytest.param(in_8_bits, marks=pytest.mark.full)])
def test_all_policies_in_one_batch(stored: Callable[[Tensor], Tensor], device: torch.device) -> None:
    lengths = [140 + 13 * i % 100 for i in range(len(POLICIES))]
    compare(list(POLICIES), lengths, device, stored=stored)


def test_short_contexts_run_dense(device: torch.device) -> None:
    names = ["quest", "streaming_llm", "quoka", "tactic, capped"]
    compare(names, [62, 67, 47, 79], device, padding=2)


@pytest.mark.parametrize("name", ["quest", "quoka", "tactic"])
def test_a_request_retracted_after_one_step_reads_its_new_pages(name: str, device: torch.device) -> None:
    torch_server, device_server = (Server([name, name], [208, 143], device) for _ in range(2))
    decode = device_decode(device_server)
    for step in range(2):
        expected = by_torch(torch_server, step)
        for layer, output in enumerate(on_device(device_server, decode, step, padding=0)):
            torch.testing.assert_close(output, expected[layer], rtol=1e-4, atol=1e-4)
        torch_server.swap()
        device_server.swap()


def test_a_verified_request_is_dense_while_it_rests(device: torch.device) -> None:
    names = ["quest, verified", "streaming_llm, verified", "quest"]
    torch_server, device_server = (Server(names, [143, 90, 120], device) for _ in range(2))
    decode = device_decode(device_server)
    for step, resting in enumerate([(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)]):
        for server in (torch_server, device_server):
            for state, rests in zip(server.states, resting, strict=False):
                state.rests = bool(rests)
        expected = by_torch(torch_server, step)
        for layer, output in enumerate(on_device(device_server, decode, step, padding=1)):
            torch.testing.assert_close(output, expected[layer], rtol=1e-4, atol=1e-4)
        torch_server.grow()
        device_server.grow()
    wanted, got = (server.statistics.rows[1:4].cpu() for server in (torch_server, device_server))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert got[:, Field.DRAFTED].tolist() == [3, 3, 0]
    assert got[:, Field.DENSE_STEPS].tolist() == [2, 2, 0]


def test_a_verified_request_drafts_in_nobodys_name(device: torch.device) -> None:
    """Its slot's next owner takes steps, and is sparse, whether the last one rested or not."""
    server = Server(["quest, verified", "quest"], [143, 143], device)
    decode = device_decode(server)
    server.states[0].rests = True
    on_device(server, decode, 0, padding=0)
    server.states[0] = server.states[1]
    server.states[0].stage = -1
    server.statistics.rows.zero_()
    on_device(server, decode, 1, padding=0)
    assert server.statistics.rows[1:3, Field.STEPS].tolist() == [1, 1]
    assert server.statistics.rows[1:3, Field.DENSE_STEPS].tolist() == [0, 0]


def test_no_row_drafts_after_a_smaller_batch_that_drafts_nothing(device: torch.device) -> None:
    server = Server(["quest, verified", "quest, verified", "quest"], [143, 143, 143], device)
    decode = device_decode(server)
    on_device(server, decode, 0, padding=0)
    verified, server.states = server.states[:2], server.states[2:]
    server.request_slots, server.lengths = server.request_slots[2:], server.lengths[2:]
    on_device(server, decode, 1, padding=0)
    server.states = [*verified, *server.states]
    server.request_slots, server.lengths = torch.arange(1, 4, device=device), [143, 143, 143]
    for state in verified:
        state.rests = True
    server.statistics.rows.zero_()
    on_device(server, decode, 2, padding=0)
    assert server.statistics.rows[1:4, Field.STEPS].tolist() == [1, 1, 1]
    assert server.statistics.rows[1:4, Field.DRAFTED].tolist() == [0, 0, 0]


@pytest.mark.usefixtures(policies_act_at_every_length.__name__)
def test_a_pass_can_be_launched_ahead_where_nobody_would_enter_anew(device: torch.device) -> None:
    server = Server(["quest, verified", "verified_pages"], [143, 170], device)
    decode = device_decode(server)
    bounds = [length + 17 for length in server.lengths]
    assert not decode.is_prepared(server.states, bounds)
    # Pages of a prefill are looked at anew in the step behind its first.
    on_device(server, decode, 0, padding=0)
    assert not decode.is_prepared(server.states, bounds)
    server.grow()
    on_device(server, decode, 1, padding=0)
    assert decode.is_prepared(server.states, bounds)
    server.states[0].begin_prefill(server.lengths[0])
    assert not decode.is_prepared(server.states, bounds)


def test_a_cap_that_cuts_nothing_asks_for_no_order(device: torch.device) -> None:
    server = Server(["tactic, capped"], [80], device)
    decode = device_decode(server)
    assert decode.needed(server.states, [80]) == Variant(frozenset({"tactic"}))
    assert decode.needed(server.states, [81]) == Variant(frozenset({"tactic"}), ordered=True)
