"""What a pass plans for its requests: who votes when, which rows go together, what is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_winnow import request_policy
from sglang_winnow.decode_plan import DecodePlan
from sglang_winnow.prefill_plan import DENSE_BLOCK, PrefillPlan
from sglang_winnow.request_state import RequestState
from tests.kernels.caches import random_cache, random_queries
from winnow_kernels.attend.dense import attend_all, prefill
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context
from winnow_kernels.decode.gpu_selector import stage_of_pages
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.indexes.pool_indexes import Indexes
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.quoka.reference import PrefillReads
from winnow_kernels.policies.snapkv.reference import SnapKVState

LAYERS, KV_HEADS, GROUP, DIM, PAGE_SIZE, SLOTS = 3, 2, 2, 32, 16, 2048
SCALE = DIM**-0.5
CPU = torch.device("cpu")
SNAPKV = {"decode": {"policy": "snapkv", "budget": 48, "observation_window": 16}}


class Pass:
    """Requests whose tokens lie one after another in a cache."""

    def __init__(self, lengths: list[int], policies: list[dict[str, Any]]) -> None:
        self.lengths = lengths
        self.indexes = Indexes([random_cache(SLOTS, KV_HEADS, DIM, layer) for layer in range(LAYERS)], PAGE_SIZE, CPU)
        self.statistics = Statistics(8, CPU)
        self.states = [
            RequestState(AttentionPolicy.model_validate(policy), length)
            for policy, length in zip(policies, lengths, strict=True)
        ]
        firsts = torch.tensor([0, *lengths]).cumsum(0)[:-1, None] + PAGE_SIZE
        self.context = Context.of(firsts + torch.arange(max(lengths)), torch.tensor(lengths), SLOTS)
        self.rows = torch.arange(1, len(lengths) + 1)

    def prefill(self, *chunks: int) -> None:
        """Prefill the first request in chunks that end at ``chunks``."""
        start = 0
        for end in chunks:
            plan = PrefillPlan(
                self.context, self.rows, self.states, [start], [end - start], self.indexes, self.statistics
            )
            for layer, cache in enumerate(self.indexes.caches):
                plan.attend(layer, self.queries(end - start, layer), cache, SCALE, None)
            plan.finish()
            start = end

    def decode(self) -> Tensor:
        plan = DecodePlan(self.context, self.lengths, self.rows, self.states, SCALE, self.indexes, self.statistics)
        output = plan.attend(0, self.queries(len(self.lengths), 0), self.indexes.caches[0], SCALE, None)
        plan.finish()
        return output

    def queries(self, count: int, layer: int) -> Tensor:
        return random_queries(count, KV_HEADS * GROUP, DIM, layer)

    def told(self, field: Field) -> list[float]:
        column: list[float] = self.statistics.rows[self.rows, field].tolist()
        return column


@pytest.fixture
def _every_length_is_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_policy, "crossover_tokens", lambda _policy: 0)


@pytest.mark.usefixtures("_every_length_is_sparse")
def test_a_prompt_votes_when_its_prefill_ends_and_its_queries_are_gone() -> None:
    own = Pass([200], [SNAPKV])
    own.prefill(100, 190)
    [state] = own.states
    assert state.kept is not None
    assert not state.kept.kept
    assert own.told(Field.DECODE_READ_BYTES) == [0]

    own = Pass([200], [SNAPKV])
    own.prefill(100, 190, 200)
    [state] = own.states
    assert state.kept is not None
    assert {layer: kept.shape for layer, kept in state.kept.kept.items()} == dict.fromkeys(
        range(LAYERS), (KV_HEADS, 48)
    )
    assert isinstance(state.kept, SnapKVState)
    assert not state.kept.observation._queries
    key_bytes = 200 * KV_HEADS * own.indexes.caches[0].vector_bytes
    assert own.told(Field.DECODE_READ_BYTES) == [LAYERS * key_bytes]


@pytest.mark.usefixtures("_every_length_is_sparse")
@pytest.mark.parametrize("policy", ["snapkv", "pyramidkv"])
def test_layers_with_a_window_are_dense_and_neither_vote_nor_count(policy: str) -> None:
    window, full = 40, [1]
    own = Pass([200], [{"decode": {"policy": policy, "budget": 48, "observation_window": 16}}])
    queries = own.queries(200, 0)
    plan = PrefillPlan(own.context, own.rows, own.states, [0], [200], own.indexes, own.statistics, layers=full)
    slots = own.context.slots[0, :200]
    for layer, cache in enumerate(own.indexes.caches):
        seen = None if layer in full else window
        output = plan.attend(layer, queries, cache, SCALE, seen)
        assert torch.equal(output, prefill(queries, slots, cache, SCALE, seen))
    plan.finish()
    [state] = own.states
    assert isinstance(state.kept, SnapKVState)
    assert {layer: kept.shape for layer, kept in state.kept.kept.items()} == {1: (KV_HEADS, 48)}
    assert not state.kept.observation._queries
    assert own.told(Field.PREFILL_CONTEXT) == [KV_HEADS * 200 * 201 / 2]

    step = DecodePlan(own.context, [200], own.rows, own.states, SCALE, own.indexes, own.statistics)
    for layer, cache in enumerate(own.indexes.caches):
        new, seen = own.queries(1, layer), None if layer in full else window
        output = step.attend(layer, new, cache, SCALE, seen)
        whole = attend_all(new, own.context, cache, SCALE, Meter(1, CPU), seen)
        assert torch.equal(output, whole) == (layer not in full)
    step.finish()
    assert own.told(Field.DECODE_CONTEXT) == [KV_HEADS * 200]
    assert own.told(Field.DECODE_ATTENDED) == [KV_HEADS * 48]


def test_pages_are_looked_at_again_after_the_first_step_behind_a_prefill() -> None:
    """Also when what was decoded before a retraction is part of that prefill."""
    own = Pass([200], [{"decode": {"policy": "quest"}}])
    [state] = own.states
    for chunks in ((120, 200), (150, 200)):
        state.prompt_length = 150
        own.prefill(*chunks)
        assert [stage_of_pages(state, length) for length in (201, 202, 300)] == [0, 1, 1]
        assert state.stage == -1
        state.stage = 0


@pytest.mark.usefixtures("_every_length_is_sparse")
def test_a_prompt_that_is_kept_whole_keeps_no_queries() -> None:
    own = Pass([40], [SNAPKV])
    own.prefill(40)
    assert own.states[0].kept is None


def test_below_the_crossover_queries_wait_for_the_first_sparse_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_policy, "crossover_tokens", lambda _policy: 4096)
    own = Pass([200], [SNAPKV])
    own.prefill(200)
    [state] = own.states
    assert state.kept is not None
    assert not state.kept.kept
    assert isinstance(state.kept, SnapKVState)
    assert set(state.kept.observation._queries) == set(range(LAYERS))


def test_dense_prefill_counts_bytes_as_a_sparse_one_does() -> None:
    own = Pass([300], [{}])
    own.prefill(200, 300)
    cache = own.indexes.caches[0]
    parts = [PrefillReads.of_dense(start, end, DENSE_BLOCK, cache) for start, end in ((0, 200), (200, 300))]
    assert own.told(Field.PREFILL_CONTEXT_BYTES) == [LAYERS * sum(part.context_bytes for part in parts)]
    assert own.told(Field.PREFILL_READ_BYTES) == own.told(Field.PREFILL_CONTEXT_BYTES)
    assert own.told(Field.PREFILL_CONTEXT) == [LAYERS * KV_HEADS * 300 * 301 / 2]


def test_a_block_always_selects_what_the_policy_says() -> None:
    policy = {"prefill": {"policy": "quoka", "budget": 64, "block": 64, "sinks": 8, "recency_ratio": 0.25}}
    own = Pass([300], [policy])
    plan = PrefillPlan(own.context, own.rows, own.states, [0], [300], own.indexes, own.statistics)
    assert plan.chunks[0].quoka is not None
    assert (plan.chunks[0].quoka.sinks, plan.chunks[0].quoka.recent(128)) == (8, 16)


def test_plain_dense_rows_are_not_read_as_those_that_may_stop() -> None:
    own = Pass([700, 300, 200], [{}, {"early_termination": {"scale": 1, "direction": 1, "patience": 1}}, {}])
    output = own.decode()
    alone = attend_all(own.queries(3, 0), own.context, own.indexes.caches[0], SCALE, Meter(3, CPU))
    assert torch.equal(output[[0, 2]], alone[[0, 2]])
    assert own.told(Field.TRAVERSALS) == [0, KV_HEADS, 0]
    assert own.told(Field.DENSE_STEPS) == [0, 0, 0]
    assert own.told(Field.SKIPPED_TILES)[1] > 0
