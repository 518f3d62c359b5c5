"""The rules for the radix cache, on SGLang's own cache, pools and prefill planner."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_winnow import radix
from sglang_winnow.block_keys import match_in_blocks
from sglang_winnow.metrics import METRICS
from sglang_winnow.sglang_versions.prefix_cache import cached_length_of, matched_length
from tests.sglang_ext.prefix_engine import CORE_SETTING, PAGE, Client, Engine, alone, hooked, tree_core, tree_cores
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy

DENSE = AttentionPolicy()
QUOKA = parse_policy('{"prefill": {"policy": "quoka", "block": 64}}')
QUOKA_WIDE = parse_policy('{"prefill": {"policy": "quoka", "block": 96}}')
QUOKA_OF_THE_PAPER = parse_policy('{"prefill": {"policy": "quoka", "block": 64, "sinks": 0, "recency_ratio": 0}}')
QUOKA_WITHOUT_SINKS = parse_policy('{"prefill": {"policy": "quoka", "block": 64, "sinks": 0}}')
QUEST = parse_policy('{"decode": {"policy": "quest"}}')
SNAPKV = parse_policy('{"decode": {"policy": "snapkv", "observation_window": 32}}')
TERMINATED = parse_policy('{"early_termination": {}}')
QUEST_KEPT = parse_policy('{"decode": {"policy": "quest"}, "keep": true}')
QUEST_SMALL_KEPT = parse_policy('{"decode": {"policy": "quest", "budget": 256}, "keep": true}')
TERMINATED_KEPT = parse_policy('{"decode": {"policy": "quest"}, "early_termination": {}, "keep": true}')
SNAPKV_KEPT = parse_policy('{"decode": {"policy": "snapkv", "observation_window": 32}, "keep": true}')
QUOKA_KEPT = parse_policy('{"decode": {"policy": "quest"}, "prefill": {"policy": "quoka", "block": 64}, "keep": true}')
DENSE_KEPT = parse_policy('{"keep": true}')
KEPT = [QUEST_KEPT, QUEST_SMALL_KEPT, TERMINATED_KEPT, SNAPKV_KEPT, QUOKA_KEPT]
POLICIES = [DENSE, QUOKA, QUOKA_WIDE, QUEST, SNAPKV, TERMINATED, *KEPT]
CLIENTS: list[Client] = [(None, None), (None, "a"), ("b", None), ("b", "a")]


@pytest.fixture(autouse=True, scope="module")
def _hooks() -> Iterator[None]:
    with hooked():
        yield


@pytest.fixture(autouse=True, params=tree_cores())
def _core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORE_SETTING, request.param)


def test_the_tree_is_the_one_that_was_asked_for() -> None:
    assert tree_core(Engine().cache) == os.environ[CORE_SETTING]


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def next_turn_cached(engine: Engine, policy: AttentionPolicy, turn: list[int]) -> int:
    request = engine.request([*turn, 7, 7, 7], policy)
    cached = engine.prefill(request)
    engine.end(request)
    return cached


@pytest.mark.parametrize("policy", [QUEST, SNAPKV, TERMINATED, QUOKA, QUOKA_WIDE])
def test_tokens_generated_after_sparse_attention_are_not_kept(policy: AttentionPolicy) -> None:
    engine = Engine()
    first = engine.request(prompt(200), policy)
    engine.prefill(first)
    engine.decode(first, 100)
    before = METRICS.totals()["uncached_generated_tokens_total"]
    engine.end(first)
    block = getattr(policy.prefill, "block", PAGE)
    assert METRICS.totals()["uncached_generated_tokens_total"] - before == 100
    engine.assert_nothing_lost([])
    assert engine.cache.evictable_size() == 200 // block * block
    assert next_turn_cached(engine, policy, [*first.origin_input_ids, *first.output_ids]) == 200 // block * block


def test_tokens_generated_densely_are_kept() -> None:
    engine = Engine()
    first = engine.request(prompt(200))
    engine.prefill(first)
    engine.decode(first, 100)
    before = METRICS.totals()["uncached_generated_tokens_total"]
    engine.end(first)
    assert METRICS.totals()["uncached_generated_tokens_total"] == before
    assert next_turn_cached(engine, DENSE, [*first.origin_input_ids, *first.output_ids]) == 300 // PAGE * PAGE


@pytest.mark.parametrize("policy", KEPT)
def test_an_answer_that_is_kept_is_found_by_later_turns_of_its_policy_alone(policy: AttentionPolicy) -> None:
    engine = Engine()
    block = getattr(policy.prefill, "block", PAGE)
    turn = prompt(50)
    computed = 0
    for number in range(8):
        request = engine.request(turn, policy)
        cached = engine.prefill(request)
        longest = min(computed, len(turn) - max(1, policy.decode.observed))
        assert cached == longest // block * block
        assert_as_alone(engine, request, len(turn))
        engine.decode(request, 30)
        before = METRICS.totals()["kept_generated_tokens_total"]
        engine.end(request)
        computed = len(turn) + 30
        kept = max(0, computed // block * block - len(turn))
        assert METRICS.totals()["kept_generated_tokens_total"] - before == request.winnow_state.kept_answer == kept
        turn = [*turn, *request.output_ids, *prompt(20, seed=number)]
    engine.assert_nothing_lost([])
    others = {other.namespace(): other for other in POLICIES if other != policy}
    assert len(others) == len(KEPT) + 2
    for other in others.values():
        assert next_turn_cached(engine, other, turn) == 0
    assert next_turn_cached(engine, policy, turn) > 0


def test_a_dense_answer_is_kept_for_everybody_also_if_that_was_asked_for() -> None:
    engine = Engine()
    first = engine.request(prompt(200), DENSE_KEPT)
    engine.prefill(first)
    engine.decode(first, 100)
    engine.end(first)
    assert next_turn_cached(engine, QUEST, [*first.origin_input_ids, *first.output_ids]) == 300 // PAGE * PAGE


@pytest.mark.parametrize("policy", [QUEST, TERMINATED])
def test_a_densely_prefilled_prompt_is_shared_by_all(policy: AttentionPolicy) -> None:
    engine = Engine()
    first = engine.request(prompt(200), policy)
    engine.prefill(first)
    engine.end(first)
    assert next_turn_cached(engine, DENSE, prompt(200)) == 192


def test_sparse_prefill_shares_with_its_own_policy_and_key_only() -> None:
    engine = Engine()
    policies = [QUOKA, QUOKA_WIDE, DENSE, QUOKA_WITHOUT_SINKS, QUOKA_OF_THE_PAPER]
    clients: list[Client] = [(None, None), (None, "a"), (None, "b"), ("c", None), ("c", "a")]
    for policy, client in product(policies, clients):
        first, second = (engine.request(prompt(100), policy, client) for _ in range(2))
        assert engine.prefill(first) == 0
        engine.end(first)
        block = getattr(policy.prefill, "block", PAGE)
        assert engine.prefill(second) == 99 // block * block
        engine.end(second)
    engine.assert_nothing_lost([])


def test_a_match_that_ends_inside_a_block_is_cut() -> None:
    engine = Engine()
    first = engine.request(prompt(256), QUOKA)
    engine.prefill(first)
    fork = [*prompt(256)[:176], *prompt(80, seed=1)]
    second = engine.request(fork, QUOKA)
    assert engine.prefill(second) == 128
    assert engine.notes_of(second, 256) == alone(QUOKA, fork)
    engine.end(first)
    engine.end(second)
    engine.assert_nothing_lost([])


def test_of_a_block_that_was_evicted_in_part_nothing_is_found() -> None:
    engine = Engine()
    request = engine.request(prompt(256), QUOKA)
    engine.prefill(request)
    engine.end(request)
    key = RadixKey(array("q", prompt(256)), radix.namespace_of(QUOKA, None, PAGE))
    asked: list[int] = []

    def match_prefix(cache: Any, params: MatchPrefixParams) -> Any:
        asked.append(len(params.key))
        if len(asked) == 1:
            params = MatchPrefixParams(key=params.key[:176])
        return cache.match_prefix(params)

    result = match_in_blocks(match_prefix, engine.cache, MatchPrefixParams(key=key))
    assert asked == [256, 128]
    assert matched_length(result) == 128


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("policy", [DENSE, QUOKA])
def test_a_request_can_be_looked_up_for_each_prefill_before_it_has_one(policy: AttentionPolicy, client: Client) -> None:
    engine = Engine()
    request = engine.request(prompt(300), policy, client)
    engine.prefill(request)
    engine.end(request)
    longer = engine.request([*prompt(300), 7, 7], DENSE, client)
    others = engine.request([*prompt(300), 7, 7], DENSE, ("c", "d"))
    for prefill, block in ((DENSE, PAGE), (QUOKA, 64)):
        own, foreign = (
            cached_length_of(engine.cache, each, radix.namespace_of(prefill, each.extra_key, PAGE))
            for each in (longer, others)
        )
        assert own == (300 // block * block if prefill == policy else 0)
        assert foreign == 0
    engine.assert_nothing_lost([])


@pytest.mark.parametrize("policy", [DENSE, QUOKA])
def test_without_a_prefix_cache_nothing_is_found_in_it(policy: AttentionPolicy) -> None:
    engine = Engine(disable=True)
    request = engine.request(prompt(300), policy)
    assert cached_length_of(engine.cache, request, radix.namespace_of(policy, None, PAGE)) == 0


@pytest.mark.parametrize("policy", [QUOKA, QUOKA_WIDE])
@pytest.mark.parametrize("disable", [False, True])
def test_chunks_end_between_blocks(policy: AttentionPolicy, disable: bool) -> None:
    engine = Engine(disable=disable)
    block = policy.prefill.block  # type: ignore[union-attr]
    request = engine.request(prompt(700), policy)
    # What is left of a chunk's budget when others have taken their part.
    engine.prefill(request, chunk=iter([40, 200, 250, 33, *[208] * 9]))
    ends = [end for _, end in engine.computed[request]]
    assert ends[-1] == 700
    assert len(ends) > 3
    assert all(end % block == 0 for end in ends[:-1])
    assert engine.notes_of(request, 700) == alone(policy, prompt(700))
    engine.end(request)
    engine.assert_nothing_lost([])


@pytest.mark.parametrize("disable", [False, True])
def test_dense_chunks_are_sglangs(disable: bool) -> None:
    engine = Engine(disable=disable)
    request = engine.request(prompt(700), QUEST)
    engine.prefill(request, chunk=208)
    assert engine.computed[request] == [(0, 208), (208, 416), (416, 624), (624, 700)]


@pytest.mark.parametrize(("length", "computed"), [(200, 40), (192, 32), (100, 36), (32, 32), (20, 20)])
def test_the_observation_window_is_computed_again(length: int, computed: int) -> None:
    engine = Engine()
    for policy in (DENSE, SNAPKV):
        request = engine.request(prompt(length), policy)
        cached = engine.prefill(request)
        engine.end(request)
    assert length - cached == computed


def test_a_retracted_request_shares_its_prompt_only() -> None:
    for policy in (QUEST, QUOKA, SNAPKV):
        engine = Engine()
        request = engine.request(prompt(200), policy)
        engine.prefill(request)
        engine.decode(request, 50)
        engine.retract(request)
        engine.assert_nothing_lost([])
        # Its generated tokens are prefilled with the prompt, in chunks that end after it.
        engine.prefill(request, chunk=iter([128, 128, 128]))
        engine.decode(request, 20)
        engine.end(request)
        engine.assert_nothing_lost([])
        block = getattr(policy.prefill, "block", PAGE)
        assert engine.cache.evictable_size() == 200 // block * block


def test_an_aborted_request_leaves_nothing_else() -> None:
    engine = Engine()
    request = engine.request(prompt(300), QUOKA)
    request.init_next_round_input(engine.cache)
    engine.computed[request] = []
    engine.adder(128).add_one_req(request, has_chunked_req=False, truncation_align_size=None)
    engine.compute(request)
    engine.insert_running(request, chunked=True)
    engine.abort(request)
    engine.assert_nothing_lost([])
    assert engine.cache.evictable_size() == 128


# Few tokens, so that prompts share beginnings of many lengths.
pieces = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90)), min_size=1, max_size=4)
steps = st.tuples(
    st.sampled_from(["submit", "submit", "next turn", "end", "retract", "abort"]),
    pieces,
    st.sampled_from(POLICIES),
    st.sampled_from(CLIENTS),
    st.lists(st.sampled_from([17, 64, 100, 208]), min_size=1, max_size=3),
    st.integers(0, 40),
)


class Event(NamedTuple):
    """What has happened: a request was ``submitted`` or ``retracted`` and then prefilled, or a step is ``done``.

    Attributes:
        request: that was prefilled; None at the end of a step.
        cached: how many of its tokens came from the cache.
        running: those that run.
    """

    name: str
    request: Any
    cached: int
    running: list[Any]


def played(engine: Engine, actions: list[Any], decoded_each: int = 1) -> Iterator[Event]:
    """Play ``steps``; of what one of them decodes, ``decoded_each`` times as many tokens."""
    running: list[Any] = []
    ended: list[int] = []
    for action, parts, policy, client, chunks, generated in actions:
        # The last is what an idle server has.
        chunk = iter([*chunks, *[208] * 9])
        ids = [token for token, count in parts for _ in range(count)]
        if action == "next turn":
            ids = [*ended, *ids][:600]
        if action in ("submit", "next turn") and len(running) < 3:
            request = engine.request(ids, policy, client)
            yield Event("submitted", request, engine.prefill(request, chunk=chunk), running)
            engine.decode(request, decoded_each * generated)
            running.append(request)
        elif running:
            request = running.pop(0)
            if action == "retract":
                engine.retract(request)
                yield Event("retracted", request, engine.prefill(request, chunk=chunk), running)
                running.append(request)
            else:
                ended = [*request.origin_input_ids, *request.output_ids]
                (engine.abort if action == "abort" else engine.end)(request)
        yield Event("done", None, 0, running)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps, min_size=4, max_size=14))
def test_kv_depends_neither_on_load_nor_on_who_came_before(actions: list[Any]) -> None:
    engine = Engine(tokens=2048)
    for name, request, cached, running in played(engine, actions):
        if name == "done":
            engine.assert_nothing_lost(running)
            continue
        count = len(request.origin_input_ids)
        if name == "submitted":
            assert cached <= max(0, count - max(1, request.winnow_state.policy.decode.observed))
            assert_as_alone(engine, request, count)
        else:
            # Its generated tokens are in the last block of its prompt now.
            assert_as_alone(engine, request, count // block_of(request) * block_of(request))


def assert_as_alone(engine: Engine, request: Any, count: int) -> None:
    """Check that the first tokens have the KV of a cold server, or what earlier turns left that are kept.

    These have decoded some, and prefilled the blocks in which their prompts ended without what came behind.
    """
    policy, ids = request.winnow_state.policy, list(request.origin_input_ids)
    pairs = zip(engine.notes_of(request, count), alone(policy, ids, engine.clients[request])[:count], strict=True)
    for found, expected in pairs:
        assert found[:2] == expected[:2]
        assert found[2] == expected[2] or (
            policy.keeps_sparse_answer and of_earlier_turn(found[2], expected[2], policy)
        )


def of_earlier_turn(found: Any, expected: Any, policy: AttentionPolicy) -> bool:
    if found[0] == "generated":
        return bool(found[1] == policy)
    same_block = found[0] == expected[0] == policy.prefill and found[2] == expected[2]
    return bool(same_block and found[1] == expected[1][: len(found[1])])


def block_of(request: Any) -> int:
    return int(getattr(request.winnow_state.policy.prefill, "block", 1))
