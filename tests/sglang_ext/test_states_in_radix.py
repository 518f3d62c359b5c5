"""The rules for the radix cache where it has states beside the KV, on SGLang's own cache, pools and prefill planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_winnow.metrics import METRICS
from sglang_winnow.sglang_versions.prefix_cache import Insertion
from tests.sglang_ext.prefix_engine import hooked
from tests.sglang_ext.state_engine import INTERVAL, StateEngine
from tests.sglang_ext.test_radix import (
    DENSE,
    KEPT,
    POLICIES,
    QUEST,
    QUEST_KEPT,
    QUOKA,
    QUOKA_KEPT,
    QUOKA_WIDE,
    SNAPKV,
    TERMINATED,
    assert_as_alone,
    block_of,
    played,
    prompt,
    steps,
)
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy

CHUNK = 64
QUOKA_OF_128 = parse_policy('{"prefill": {"policy": "quoka", "block": 128}}')
RELEASED = parse_policy('{"decode": {"policy": "snapkv", "observation_window": 32, "release": true}}')
# Of a block and of a chunk of SGLang's kernels: its states lie there.
STEPS = {QUOKA: 64, QUOKA_WIDE: 192, QUOKA_OF_128: 128, QUOKA_KEPT: 64}


@pytest.fixture(autouse=True, scope="module")
def _hooks() -> Iterator[None]:
    with hooked():
        yield


def answered(engine: StateEngine, policy: AttentionPolicy, length: int, generated: int) -> list[int]:
    """Return the prompt and the answer of a request that has ended."""
    request = engine.request(prompt(length), policy)
    engine.prefill(request)
    engine.decode(request, generated)
    engine.assert_state_is_its_own(request)
    engine.end(request)
    engine.assert_nothing_lost([])
    return [*request.origin_input_ids, *request.output_ids]


def next_turn_cached(engine: StateEngine, policy: AttentionPolicy, turn: list[int]) -> int:
    request = engine.request([*turn, 7, 7, 7], policy)
    cached = engine.prefill(request)
    engine.assert_state_is_its_own(request)
    assert_as_alone(engine, request, len(turn) + 3)
    engine.end(request)
    engine.assert_nothing_lost([])
    return cached


@pytest.mark.parametrize("policy", [QUEST, SNAPKV, TERMINATED, QUOKA, QUOKA_WIDE, QUOKA_OF_128])
@pytest.mark.parametrize("generated", [0, 10, INTERVAL, 3 * INTERVAL])
def test_states_after_sparse_attention_are_not_kept(policy: AttentionPolicy, generated: int) -> None:
    engine = StateEngine()
    before = METRICS.totals()["uncached_generated_tokens_total"]
    turn = answered(engine, policy, 300, generated)
    assert METRICS.totals()["uncached_generated_tokens_total"] - before == generated
    step = STEPS.get(policy, CHUNK)
    assert next_turn_cached(engine, policy, turn) == 300 // step * step
    # All of that turn was a prompt.
    assert next_turn_cached(engine, DENSE, turn) == (0 if policy in STEPS else (len(turn) + 3) // CHUNK * CHUNK)


def test_states_after_dense_attention_are_kept() -> None:
    engine = StateEngine()
    turn = answered(engine, DENSE, 300, 100)
    assert next_turn_cached(engine, QUEST, turn) == 384


@pytest.mark.parametrize("policy", KEPT)
def test_states_of_an_answer_that_is_kept_are_found_by_later_turns_of_its_policy_alone(policy: AttentionPolicy) -> None:
    engine = StateEngine()
    before = METRICS.totals()["kept_generated_tokens_total"]
    turn = answered(engine, policy, 300, 100)
    assert METRICS.totals()["kept_generated_tokens_total"] - before == 84
    others = {other.namespace(): other for other in POLICIES if other.namespace() != policy.namespace()}
    for other in others.values():
        assert next_turn_cached(engine, other, turn) == 0
    # The state at 384 lies in what an observation window computes anew.
    assert next_turn_cached(engine, policy, turn) == (256 if policy.decode.observed else 384)


def test_a_request_that_gives_back_its_prompt_leaves_no_state() -> None:
    engine = StateEngine()
    turn = answered(engine, RELEASED, 300, 100)
    assert engine.cache.mamba_evictable_size() == 0
    assert next_turn_cached(engine, DENSE, turn) == 0


@pytest.mark.parametrize("policy", [QUOKA, QUOKA_WIDE, QUOKA_OF_128, QUEST])
@pytest.mark.parametrize("length", [40, 129, 250, 256, 700])
def test_a_state_lies_between_blocks_wherever_a_prompt_ends(policy: AttentionPolicy, length: int) -> None:
    engine = StateEngine()
    answered(engine, policy, length, 1)
    step = STEPS.get(policy, CHUNK)
    assert next_turn_cached(engine, policy, prompt(length)) == length // step * step


@pytest.mark.parametrize("policy", [DENSE, QUOKA, QUOKA_WIDE, SNAPKV])
def test_a_fork_goes_on_from_a_state_behind_what_it_shares(policy: AttentionPolicy) -> None:
    engine = StateEngine()
    for length in (128, 256):
        answered(engine, policy, length, 1)
    for shared, seed in ((250, 1), (180, 2), (180, 3), (180, 4)):
        fork = engine.request([*prompt(256)[:shared], *prompt(200, seed=seed)], policy)
        cached = engine.prefill(fork)
        assert cached <= shared // block_of(fork) * block_of(fork)
        engine.assert_state_is_its_own(fork)
        assert_as_alone(engine, fork, shared + 200)
        engine.end(fork)
    engine.assert_nothing_lost([])


@pytest.mark.parametrize("policy", [QUEST, QUOKA, SNAPKV, QUEST_KEPT, DENSE])
def test_a_retracted_request_has_no_state_of_its_first_run(policy: AttentionPolicy) -> None:
    engine = StateEngine()
    request = engine.request(prompt(200), policy)
    engine.prefill(request)
    engine.decode(request, 100)
    engine.retract(request)
    engine.assert_nothing_lost([])
    engine.prefill(request, chunk=iter([128, 128, 128]))
    engine.assert_state_is_its_own(request)
    engine.decode(request, 70)
    engine.assert_state_is_its_own(request)
    turn = [*request.origin_input_ids, *request.output_ids]
    engine.end(request)
    engine.assert_nothing_lost([])
    cached = next_turn_cached(engine, policy, turn)
    assert cached >= 192
    if not (policy.answers_densely or policy.keeps_sparse_answer):
        assert cached == 192


@pytest.mark.parametrize(
    "scenario",
    [
        partial(test_states_after_sparse_attention_are_not_kept, QUEST, 3 * INTERVAL),
        partial(test_a_state_lies_between_blocks_wherever_a_prompt_ends, QUOKA_WIDE, 129),
    ],
)
def test_without_the_rule_a_state_is_kept_that_does_not_belong(
    scenario: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Insertion, "_drop_state", lambda *_: None)
    with pytest.raises(AssertionError):
        scenario()


@settings(max_examples=60)
@given(st.lists(steps, min_size=4, max_size=14), st.sampled_from([21, 60]))
def test_states_depend_neither_on_load_nor_on_who_came_before(actions: list[Any], states: int) -> None:
    engine = StateEngine(tokens=2048, states=states)
    for name, request, _, running in played(engine, actions, decoded_each=4):
        if name == "submitted":
            assert_as_alone(engine, request, len(request.origin_input_ids))
        elif name == "done":
            for each in running:
                engine.assert_state_is_its_own(each)
            engine.assert_nothing_lost(running)
