"""Prefixes on a real server: shared among requests that would have computed the same KV, and with nobody else."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.models import ModelShape
from tests.runtime import Runtime
from tests.sglang_ext.conftest import SERVED_MODEL

QUOKA = {"prefill": {"policy": "quoka", "budget": 64, "block": 64}}
QUOKA_WITHOUT_SINKS = {"prefill": {"policy": "quoka", "budget": 64, "block": 64, "sinks": 0}}
QUEST = {"decode": {"policy": "quest", "budget": 64, "full_layers": 0}}
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
