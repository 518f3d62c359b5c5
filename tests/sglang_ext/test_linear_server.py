"""Servers of Qwen3-Next's and Qwen3.5's shape: policies act on the layers with full attention, SGLang runs the others.

SGLang without Winnow's attention, served beside it, says what is expected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from tests.sglang_ext import linear_servers
from tests.sglang_ext.answers import TOLERANCE, equal_steps, steps
from tests.sglang_ext.linear_servers import (
    CHUNK,
    COVERED,
    DEPLOYMENTS,
    FULL,
    INTERVAL,
    LINEAR,
    ON_CUDA,
    POLICIES,
    QUOKA,
    ROUNDING,
    ROUNDING_OF_SELECTIONS,
    STATES_EVERY,
    TOKENS,
    Deployment,
    Server,
    cached,
    cost,
    first_step,
    sglang_server,
    winnow_server,
    written_model,
)
from tests.sglang_ext.reference import Reference

# Each token of each request is half a second of interpreted kernels.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

PROMPT = 300
DIFFERENT = 1e-3
TERMINATED: Final[Mapping[str, Any]] = {
    "decode": {"policy": "streaming_llm", "window": 256},
    "early_termination": {"scale": 0.5, "direction": 0.5, "patience": 1},
}


@pytest.fixture(scope="module", params=DEPLOYMENTS)
def deployment(request: pytest.FixtureRequest) -> Deployment:
    return DEPLOYMENTS[request.param]


@pytest.fixture(scope="module")
def model(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_model(tmp_path_factory.mktemp("linear") / "model", deployment.family)


@pytest.fixture(scope="module")
def server(deployment: Deployment, model: Path) -> Iterator[Server]:
    with winnow_server(model, model.parent / "winnow.log", *deployment.options) as own:
        yield own


@pytest.fixture(scope="module")
def sglang(deployment: Deployment, model: Path) -> Iterator[Server]:
    with sglang_server(model, model.parent / "sglang.log", *deployment.options) as own:
        yield own


def prompt(seed: int, length: int = PROMPT) -> list[int]:
    return linear_servers.prompt(seed, length)


def test_server_and_answers_tell_which_layers_are_left_out(server: Server) -> None:
    information = server.http.get("/server_info").raise_for_status().json()["winnow"]
    assert (information["linear_layers"], information["sliding_layers"]) == (LINEAR, [])
    answer = cost(server.ask(prompt(0), {}))
    assert (answer["linear_layers"], answer["sliding_layers"]) == (len(LINEAR), 0)


@pytest.mark.parametrize("length", [1, 40, 64, 65, PROMPT, CHUNK + 100])
def test_dense_answers_are_sglangs_own(server: Server, sglang: Server, length: int) -> None:
    text = prompt(length, length)
    for computed in (0, (length - 1) // STATES_EVERY * STATES_EVERY):
        own, expected = server.ask(text, {}), sglang.ask(text, {})
        assert cached(own) == cached(expected) == computed
        equal_steps(own, expected, ROUNDING)
        assert cost(own)["decode"]["attended_ratio"] == 1


@pytest.mark.skipif(ON_CUDA, reason="what SGLang launches on CUDA is its own")
def test_linear_attention_in_torch_is_that_of_transformers(deployment: Deployment, model: Path, sglang: Server) -> None:
    text = prompt(1)
    answer = sglang.ask(text, {})
    reference, tokens = Reference(model, deployment.attention), answer["output_ids"]
    assert max(reference.logit_gaps(text, tokens)) < TOLERANCE
    told = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
    assert told == pytest.approx(reference.logprobs(text, tokens), abs=TOLERANCE)


@pytest.mark.parametrize("name", COVERED)
def test_a_policy_that_covers_the_context_answers_as_dense_attention(server: Server, sglang: Server, name: str) -> None:
    text = prompt(2)
    answer = server.ask(text, COVERED[name])
    equal_steps(answer, sglang.ask(text, {}), ROUNDING)
    decode = cost(answer)["decode"]
    assert (decode["policy"], decode["dense_steps"]) == (name, decode["steps"])
    assert decode["steps"] == TOKENS - 1


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_reads_less_and_answers_otherwise(server: Server, sglang: Server, name: str) -> None:
    text = prompt(3)
    answer, dense = server.ask(text, POLICIES[name]), sglang.ask(text, {})
    decode = cost(answer)["decode"]
    assert (decode["policy"], decode["dense_steps"]) == (name, 0)
    assert 0 < decode["attended_ratio"] < 1
    # The first token is the prefill's.
    equal_steps(first_step(answer), first_step(dense), ROUNDING)
    pairs = list(zip(steps(answer), steps(dense), strict=True))[1:]
    assert any(own.token != wanted.token or abs(own.logprob - wanted.logprob) > DIFFERENT for own, wanted in pairs)


def test_ratios_are_of_the_layers_with_full_attention_alone(server: Server) -> None:
    contexts = [PROMPT + step for step in range(1, TOKENS)]
    budget = 96
    decode = cost(server.ask(prompt(4), {"decode": {"policy": "streaming_llm", "sinks": 0, "window": budget}}))[
        "decode"
    ]
    assert decode["steps"] == len(contexts)
    assert decode["attended_ratio"] == pytest.approx(len(contexts) * budget / sum(contexts), abs=1e-6)


def test_policies_in_one_batch_answer_as_alone(server: Server) -> None:
    names = POLICIES if ON_CUDA else ("quest", "snapkv", "delta")
    asked = [{}, *(POLICIES[name] for name in names), TERMINATED, QUOKA]
    alone = [server.ask(prompt(20 + number), policy) for number, policy in enumerate(asked)]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda each: server.ask(prompt(20 + each[0]), each[1]), enumerate(asked)))
    for own, expected in zip(together, alone, strict=True):
        equal_steps(own, expected, ROUNDING_OF_SELECTIONS)
        assert cost(own)["decode"]["policy"] == cost(expected)["decode"]["policy"]


# More than one copy of the state behind the prompt. The step that overlap runs beyond the end makes none.
BEHIND, LONG_ANSWER = 250, 2 * INTERVAL + 10
LAST_COPY: Final = (BEHIND + LONG_ANSWER - 1) // INTERVAL * INTERVAL


@pytest.mark.parametrize("name", ["quest", "streaming_llm"])
def test_a_dense_turn_goes_on_from_the_state_of_the_prompt_alone(server: Server, sglang: Server, name: str) -> None:
    """What was decoded sparsely is computed anew: from a state of it, the answer would be another."""
    text = prompt(100 + list(POLICIES).index(name), BEHIND)
    answer = server.ask(text, POLICIES[name], LONG_ANSWER)
    turn = [*text, *answer["output_ids"], *prompt(50, 20)]
    own, expected = server.ask(turn, {}), sglang.ask(turn, {})
    assert cached(own) == BEHIND // STATES_EVERY * STATES_EVERY
    equal_steps(own, expected, ROUNDING)


@pytest.mark.parametrize("answered", [LONG_ANSWER, LONG_ANSWER - 4])
def test_a_dense_answer_is_kept_for_the_next_turn(server: Server, sglang: Server, answered: int) -> None:
    """Also if the last copy is of the step that overlap runs beyond the end."""
    text = prompt(answered, BEHIND)
    answer = server.ask(text, {}, answered)
    assert answer["output_ids"] == sglang.ask(text, {}, answered)["output_ids"] or ON_CUDA
    turn = [*text, *answer["output_ids"], *prompt(51, 20)]
    own, expected = server.ask(turn, POLICIES["quest"]), sglang.ask(turn, {})
    assert cached(own) >= LAST_COPY - INTERVAL
    assert cached(own) == cached(expected) or ON_CUDA
    equal_steps(first_step(own), first_step(expected), ROUNDING)


def test_a_sparse_answer_that_is_kept_is_there_for_its_policy_alone(server: Server) -> None:
    policy = POLICIES["streaming_llm"] | {"keep": True}
    text = prompt(7, BEHIND)
    answer = server.ask(text, policy, LONG_ANSWER)
    assert cost(answer)["decode"]["kept_tokens"] == LAST_COPY - BEHIND
    turn = [*text, *answer["output_ids"], *prompt(52, 20)]
    assert cached(server.ask(turn, {})) == 0
    assert cached(server.ask(turn, policy)) == LAST_COPY


@pytest.mark.parametrize("length", [200, PROMPT, CHUNK + 100])
def test_sparse_prefill_goes_on_from_states_between_blocks(server: Server, sglang: Server, length: int) -> None:
    text = prompt(60 + length, length)
    first = server.ask(text, QUOKA)
    assert cached(first) == 0
    assert cost(first)["prefill"]["attended_ratio"] < 1
    again = server.ask(text, QUOKA)
    assert cached(again) == (length - 1) // 128 * 128
    turn = [*text, *first["output_ids"], *prompt(53, 150)]
    warm, cold = server.ask(turn, QUOKA), server.ask(turn, QUOKA, extra_key="cold")
    assert (cached(warm), cached(cold)) == (length // 128 * 128, 0)
    equal_steps(warm, cold, ROUNDING_OF_SELECTIONS)
    dense = server.ask(turn, {})
    assert cached(dense) == 0
    equal_steps(dense, sglang.ask(turn, {}), ROUNDING)


def test_a_prompt_is_given_back(server: Server, sglang: Server) -> None:
    policy = {"decode": {"policy": "snapkv", "budget": 48, "observation_window": 16, "release": True}}
    text = prompt(8)
    kept = server.ask(text, {"decode": {**policy["decode"], "release": False}})
    answer = server.ask(text, policy)
    assert cost(answer)["decode"]["released_tokens"] >= 0
    equal_steps(answer, kept, ROUNDING_OF_SELECTIONS)
    fresh = server.ask(text, policy, extra_key="alone")
    assert cost(fresh)["decode"]["released_tokens"] > 0
    equal_steps(fresh, kept, ROUNDING_OF_SELECTIONS)
    equal_steps(server.ask(text, {}), sglang.ask(text, {}), ROUNDING)


def test_layers_with_linear_attention_are_neither_chosen_nor_explained(deployment: Deployment, server: Server) -> None:
    delta = {"decode": {"policy": "delta", "budget": 64, "recency": 32, "delta_layers": [0, 1], "full_layers": 0}}
    refused = server.post(prompt(9), delta)
    assert refused.status_code == 400
    assert "layer 0 has linear attention" in refused.text
    # Of two ranks neither sees all heads.
    of_full = 400 if "--tp-size" in deployment.options else 200
    for layers, status in ((LINEAR, 400), (FULL, of_full)):
        explain = {"attention_explain": json.dumps({"steps": [1], "layers": layers, "heads": [0]})}
        assert server.post(prompt(9), POLICIES["quest"], custom=explain).status_code == status
    assert server.post(prompt(9), POLICIES["quest"] | {"verify": {}}).status_code == 400
