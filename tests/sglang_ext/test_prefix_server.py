"""Prefixes on a real server: shared among requests that would have computed the same KV, and with nobody else."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.models import ModelShape
from tests.runtime import Runtime
from tests.sglang_ext.conftest import LOAD_REQUESTS, SERVED_MODEL

QUOKA = {"prefill": {"policy": "quoka", "budget": 64, "block": 64}}
QUOKA_WITHOUT_SINKS = {"prefill": {"policy": "quoka", "budget": 64, "block": 64, "sinks": 0}}
QUEST = {"decode": {"policy": "quest", "budget": 64, "full_layers": 0}}
QUEST_KEPT = QUEST | {"keep": True}
# It reads everything, as dense attention does, and is not known to.
COVERED_KEPT = {"decode": {"policy": "quest", "budget": 4096}, "keep": True}
SNAPKV_KEPT = {"decode": {"policy": "snapkv", "observation_window": 32, "budget": 64}, "keep": True}
BOTH_KEPT = QUEST | QUOKA | {"keep": True}
DENSE: dict[str, Any] = {}
LENGTH = 600
IN_PAGES, IN_BLOCKS = 592, 576


@pytest.fixture(scope="module")
def http(small_server: Runtime) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=small_server.url, timeout=60) as client:
        yield client


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(2, ModelShape().vocab_size), k=length)


def answer(http: httpx.Client, prompt: list[int], policy: Any, **fields: Any) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling | {"custom_params": {"attention": json.dumps(policy)}}}
    response = http.post("/generate", json=body | fields | {"return_logprob": True})
    assert response.status_code == 200, response.text
    return response.json()["meta_info"]


def scores(answer: Any) -> list[float]:
    return [score for score, _, _ in answer["output_token_logprobs"]]


def test_no_request_sees_what_another_policy_wrote(http: httpx.Client) -> None:
    document = prompt(1)
    policies = [QUOKA, DENSE, QUOKA_WITHOUT_SINKS, QUEST]
    alone = [answer(http, document, policy, extra_key=f"alone {policy}") for policy in policies]
    assert [one["cached_tokens"] for one in alone] == [0] * 4
    assert len({tuple(scores(one)) for one in alone}) == 4
    cached = {}
    for turn in range(3):
        for index, policy in enumerate(policies):
            one = answer(http, document, policy)
            assert scores(one) == pytest.approx(scores(alone[index]), abs=1e-4)
            cached[turn, index] = one["cached_tokens"]
    # Quest's prompt is the dense one's.
    assert [cached[0, index] for index in range(4)] == [0, 0, 0, IN_PAGES]
    assert [cached[2, index] for index in range(4)] == [IN_BLOCKS, IN_PAGES, IN_BLOCKS, IN_PAGES]


def test_a_fork_within_a_block_leaves_both_sides_as_they_were(http: httpx.Client) -> None:
    document = prompt(2)
    fork = [*document[:300], *prompt(3, 300)]
    alone = [answer(http, of, QUOKA, extra_key=f"fork {index}") for index, of in enumerate((document, fork))]
    for index, of in enumerate((document, fork, document, fork)):
        one = answer(http, of, QUOKA)
        assert scores(one) == pytest.approx(scores(alone[index % 2]), abs=1e-4)
        assert one["cached_tokens"] == [0, 256, IN_BLOCKS, IN_BLOCKS][index]


@pytest.mark.parametrize("policy", [DENSE, QUOKA, QUEST], ids=["dense", "quoka", "quest"])
def test_clients_keys_and_salts_part_the_cache_under_every_policy(http: httpx.Client, policy: Any) -> None:
    document = prompt(4 + len(json.dumps(policy)))
    body = {"model": SERVED_MODEL, "prompt": document, "max_tokens": 2, "temperature": 0}
    body |= {"custom_params": {"attention": json.dumps(policy)}}
    kept = IN_BLOCKS if policy == QUOKA else IN_PAGES
    for client in ({}, {"extra_key": "a"}, {"cache_salt": "b"}, {"extra_key": "a", "cache_salt": "b"}):
        for cached in (0, kept):
            response = http.post("/v1/completions", json=body | client)
            assert response.status_code == 200, response.text
            assert response.json()["attention"]["prefill"]["cached_tokens"] == cached, client


def test_what_was_decoded_sparsely_is_computed_again(http: httpx.Client) -> None:
    document = prompt(5)
    sampling = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
    for policy, cached in ((QUEST, IN_PAGES), (DENSE, 688)):
        custom = {"custom_params": {"attention": json.dumps(policy)}}
        response = http.post("/generate", json={"input_ids": document, "sampling_params": sampling | custom})
        turn = [*document, *response.json()["output_ids"], *prompt(6, 20)]
        assert answer(http, turn, DENSE)["cached_tokens"] == cached


def conversation(http: httpx.Client, policy: Any, turns: list[list[int]], key: str) -> list[Any]:
    """Return the answers to turns; a key that ends with # is another for each of them, so that nothing is found."""
    return [
        answer(http, turn, policy, extra_key=f"{key}{number if key.endswith('#') else ''}")
        for number, turn in enumerate(turns)
    ]


def eight_turns(http: httpx.Client, policy: Any, seed: int) -> list[list[int]]:
    turns = [prompt(seed, 200)]
    for number in range(7):
        one = answer(http, turns[-1], policy, extra_key=f"lead {seed}")
        generated = [token for _, token, _ in one["output_token_logprobs"]]
        turns.append([*turns[-1], *generated, *prompt(seed + number, 20)])
    return turns


def test_a_conversation_that_is_kept_is_not_computed_again_and_goes_on_as_without_a_cache(http: httpx.Client) -> None:
    turns = eight_turns(http, COVERED_KEPT, 20)
    kept = conversation(http, COVERED_KEPT, turns, "kept")
    computed = conversation(http, {}, turns, "computed #")
    for one, other in zip(kept, computed, strict=True):
        assert scores(one) == pytest.approx(scores(other), abs=1e-4)
    # With overlap scheduling, the KV of the last token is computed too.
    assert [one["cached_tokens"] for one in kept] == [0, *((len(turn) + 12) // 16 * 16 for turn in turns[:-1])]
    assert [one["cached_tokens"] for one in computed] == [0] * 8
    of_answers = [one["attention"]["decode"]["kept_tokens"] for one in kept]
    assert of_answers == [(len(turn) + 12) // 16 * 16 - len(turn) for turn in turns]
    assert computed[0]["attention"]["decode"]["kept_tokens"] is None


@pytest.mark.parametrize("policy", [QUEST_KEPT, SNAPKV_KEPT, BOTH_KEPT], ids=["quest", "snapkv", "quest and quoka"])
def test_a_sparse_conversation_that_is_kept_is_the_same_each_time(http: httpx.Client, policy: Any) -> None:
    seed = 40 + len(json.dumps(policy))
    turns = eight_turns(http, policy, seed)
    first, second = (conversation(http, policy, turns, key) for key in ("first", "second"))
    for one, other in zip(first, second, strict=True):
        assert scores(one) == pytest.approx(scores(other), abs=1e-4)
        assert one["cached_tokens"] == other["cached_tokens"]
    step = 64 if policy == BOTH_KEPT else 16
    window = 32 if policy == SNAPKV_KEPT else 1
    ends = [min(len(before) + 12, len(turn) - window) for before, turn in pairwise(turns)]
    assert [one["cached_tokens"] for one in first] == [0, *(end // step * step for end in ends)]


def test_nobody_else_finds_what_was_kept(http: httpx.Client) -> None:
    turn = eight_turns(http, QUEST_KEPT, 60)[-1]
    others = [
        DENSE,
        QUOKA,
        BOTH_KEPT,
        SNAPKV_KEPT,
        {"decode": QUEST["decode"] | {"budget": 80}, "keep": True},
        QUEST_KEPT | {"early_termination": {}},
    ]
    assert [answer(http, turn, policy, extra_key="lead 60")["cached_tokens"] for policy in others] == [0] * 6
    assert answer(http, turn, QUEST, extra_key="lead 60")["cached_tokens"] == (len(turn) - 1) // 16 * 16
    assert answer(http, turn, QUEST_KEPT, extra_key="lead 61")["cached_tokens"] == 0
    assert answer(http, turn, QUEST_KEPT, extra_key="lead 60")["cached_tokens"] > 0


AUTO: dict[str, Any] = {"quality": {}}


def test_a_conversation_whose_policies_are_chosen_keeps_what_is_cached(http: httpx.Client) -> None:
    turns = eight_turns(http, AUTO, 70)
    answers = conversation(http, AUTO, turns, "chosen")
    told = [one["attention"]["quality"]["chosen"] for one in answers]
    assert told == [told[0]] * 8
    assert (told[0]["prefill"]["policy"], told[0]["decode"]["policy"]) == ("quoka", "quest")
    assert [one["cached_tokens"] for one in answers] == [0, *(len(turn) // 64 * 64 for turn in turns[:-1])]


def test_a_conversation_that_is_cached_densely_goes_on_densely(http: httpx.Client) -> None:
    turns = eight_turns(http, AUTO, 71)
    answer(http, turns[0], DENSE, extra_key="began densely")
    answers = conversation(http, AUTO, turns[1:], "began densely")
    assert {one["attention"]["prefill"]["policy"] for one in answers} == {"dense"}
    assert {one["attention"]["decode"]["policy"] for one in answers} == {"quest"}
    assert [one["cached_tokens"] for one in answers] == [len(turn) // 16 * 16 for turn in turns[:-1]]


def test_what_is_chosen_answers_as_if_it_had_been_asked_for(http: httpx.Client) -> None:
    document = prompt(72, 300)
    chosen = answer(http, document, {"quality": {"kl": 0.012}, "audit": 0.5}, extra_key="chosen")
    quality = chosen["attention"]["quality"]
    expected = {"kl": 0.01, "top1": 0.98, "kv_read_ratio": 0.4, "prefill_kv_read_ratio": 1.0, "true_share": None}
    assert quality["expected"] == expected
    assert (quality["under_load"], quality["left"]) == (None, [])
    assert (quality["kl"], quality["top1"], quality["measured_lengths"]) == (0.012, None, [150, 2000])
    assert chosen["attention"]["audit"]["steps"] > 0
    asked = answer(http, document, quality["chosen"], extra_key="asked")
    assert scores(chosen) == pytest.approx(scores(asked), abs=1e-4)
    assert asked["attention"]["quality"] is None


@pytest.mark.parametrize(
    ("quality", "length", "policies"),
    [
        ({}, 300, ("quest", "quoka")),
        ({"kl": 0.001}, 300, ("dense", "dense")),
        ({"top1": 0.985}, 300, ("dense", "quoka")),
        ({"within": {"prefill": ["dense"]}}, 300, ("quest", "dense")),
        ({"within": {"decode": ["dense", "quest"], "max_budget": 48}}, 300, ("dense", "dense")),
        ({}, 100, ("dense", "dense")),
        ({}, 2001, ("dense", "dense")),
    ],
)
def test_the_choice_goes_by_quality_length_and_bounds(
    http: httpx.Client, quality: dict[str, Any], length: int, policies: tuple[str, str]
) -> None:
    one = answer(http, prompt(73, length), {"quality": quality}, extra_key=json.dumps([quality, length]))["attention"]
    assert (one["decode"]["policy"], one["prefill"]["policy"]) == policies
    assert bool(one["warnings"]) == (length in (100, 2001))


def test_bounds_that_leave_nothing_refuse_the_request_alone(http: httpx.Client) -> None:
    policy = {"quality": {"kl": 0.001, "within": {"decode": ["quest"]}}}
    body = {"input_ids": prompt(74, 300), "sampling_params": {"custom_params": {"attention": json.dumps(policy)}}}
    response = http.post("/generate", json=body)
    assert response.status_code == 400
    assert "attention.quality: no policy within the bounds keeps it at 300 tokens" in response.text
    assert answer(http, prompt(74), DENSE)["attention"]["quality"] is None


@contextlib.contextmanager
def others(http: httpx.Client, number: int) -> Iterator[None]:
    """So many requests run meanwhile."""
    sampling = {"temperature": 0, "max_new_tokens": 1200, "ignore_eos": True}
    with contextlib.ExitStack() as stack:
        for index in range(number):
            # SGLang aborts a stream that was left once more, later: by an id that must be nobody else's by then.
            body = {"input_ids": prompt(80 + index, 20), "rid": uuid4().hex, "stream": True}
            stream = stack.enter_context(http.stream("POST", "/generate", json=body | {"sampling_params": sampling}))
            next(stream.iter_lines())
            stack.callback(http.post, "/abort_request", json={"rid": body["rid"]})
        yield


def under_load_requests(http: httpx.Client) -> float:
    state = http.get("/server_info").json()["internal_states"][0]
    return float(state["winnow"]["under_load_requests_total"])


def test_under_load_the_decode_policy_may_be_cheaper_and_the_prefill_stays(http: httpx.Client) -> None:
    named = {"quality": {"kl": 0.02}}
    goes_down = {"quality": {"kl": 0.02, "under_load": {"kl": 0.035}}}
    before = under_load_requests(http)
    with others(http, LOAD_REQUESTS - 1):
        calm = answer(http, prompt(75, 300), AUTO, extra_key="load")["attention"]
    with others(http, LOAD_REQUESTS):
        loaded = answer(http, prompt(75, 300), AUTO, extra_key="load")
        kept = answer(http, prompt(75, 300), named, extra_key="load")["attention"]
        densely = goes_down["quality"] | {"within": {"prefill": ["dense"]}}
        asked = answer(http, prompt(76, 300), {"quality": densely}, extra_key="load")["attention"]
    assert (calm["quality"]["under_load"], kept["quality"]["under_load"]) == (None, None)
    assert calm["quality"]["chosen"] == kept["quality"]["chosen"]
    assert loaded["attention"]["quality"]["under_load"] == {"kl": 0.05, "top1": None, "requests": LOAD_REQUESTS}
    assert asked["quality"]["under_load"] == {"kl": 0.035, "top1": None, "requests": LOAD_REQUESTS}
    for told, budget, prefill in ((calm, 64, "quoka"), (loaded["attention"], 32, "quoka"), (asked, 32, "dense")):
        chosen = told["quality"]["chosen"]
        assert (chosen["decode"]["budget"], chosen["prefill"]["policy"]) == (budget, prefill)
        assert told["decode"]["budget_effective"] == budget
    # It goes on in the part of the cache in which it began without load.
    assert loaded["cached_tokens"] == 256
    assert under_load_requests(http) == before + 2
