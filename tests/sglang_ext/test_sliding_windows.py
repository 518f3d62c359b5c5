"""A model whose layers mostly see a sliding window, over a server on the CPU: policies act on the other layers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sglang_winnow import crossover
from tests.models import ModelShape, write_model, write_weights
from tests.policy_rows import small_policies
from tests.runtime import runtime_server
from tests.sglang_ext.answers import prompt_of
from tests.sglang_ext.reference import Reference

pytestmark = pytest.mark.timeout(600)

SHAPE = ModelShape(family="gemma3_text", layers=6, kv_heads=2, sliding_window=64)
SLIDING, FULL = [0, 1, 3, 4], 2
CHUNK, TOKENS, PROMPT = 128, 8, 500
LOGIT_TOLERANCE = 1e-3
POLICIES: dict[str, Any] = {name: policy for name, policy in small_policies().items() if name != "dense"} | {
    "delta": {"decode": {"policy": "delta", "budget": 64, "recency": 32, "delta_layers": [FULL], "full_layers": 1}}
}


class Server:
    def __init__(self, url: str, reference: Reference) -> None:
        self._http = httpx.Client(base_url=url, timeout=240)
        self.reference = reference

    def information(self) -> Any:
        return self._http.get("/server_info").raise_for_status().json()

    def ask(self, prompt: list[int], policy: Any) -> httpx.Response:
        parameters: dict[str, Any] = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        parameters["custom_params"] = {"attention": json.dumps(policy)}
        return self._http.post("/generate", json={"input_ids": prompt, "sampling_params": parameters})

    def answer(self, prompt: list[int], policy: Any) -> Any:
        return self.ask(prompt, policy).raise_for_status().json()

    def cost(self, prompt: list[int], policy: Any) -> Any:
        return self.answer(prompt, policy)["meta_info"]["attention"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sliding")
    model = write_model(folder / "model", SHAPE)
    write_weights(model)
    arguments = ["--attention-backend", "winnow", "--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "4096"]
    environment = {crossover.ENVIRONMENT: "0", "SGLANG_DEBUG_MEMORY_POOL": "1"}
    with runtime_server(model, *arguments, log=folder / "log", **environment) as runtime:
        yield Server(runtime.url, Reference(model))


def prompt(seed: int, length: int = PROMPT) -> list[int]:
    return prompt_of(length, seed, SHAPE.vocab_size)


@pytest.mark.parametrize("length", [1, 63, 64, 65, CHUNK + 1, PROMPT])
def test_dense_answers_are_those_of_transformers(server: Server, length: int) -> None:
    text = prompt(length, length)
    first, again = server.answer(text, {}), server.answer(text, {})
    assert again["meta_info"]["cached_tokens"] == (length - 1) // 16 * 16
    for answer in (first, again):
        assert len(answer["output_ids"]) == TOKENS
        assert max(server.reference.logit_gaps(text, answer["output_ids"])) < LOGIT_TOLERANCE
    assert first["meta_info"]["attention"]["decode"]["attended_ratio"] == 1


def test_server_and_answers_tell_which_layers_are_left_out(server: Server) -> None:
    assert server.information()["winnow"]["sliding_layers"] == SLIDING
    assert server.cost(prompt(1), {})["sliding_layers"] == len(SLIDING)


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_reads_less_of_the_other_layers(server: Server, name: str) -> None:
    decode = server.cost(prompt(2), POLICIES[name])["decode"]
    assert (decode["policy"], decode["dense_steps"]) == (name, 0)
    assert decode["attended_ratio"] < 1


def test_ratios_are_of_the_layers_with_full_attention_alone(server: Server) -> None:
    # A step more or less could end up in the counts only by a mistake: the first token is the prefill's.
    contexts = [PROMPT + step for step in range(1, TOKENS)]
    budget = 96
    recent = server.cost(prompt(4), {"decode": {"policy": "streaming_llm", "sinks": 0, "window": budget}})["decode"]
    assert recent["steps"] == len(contexts)
    assert recent["attended_ratio"] == pytest.approx(len(contexts) * budget / sum(contexts), abs=1e-6)
    # Both layers together keep twice the budget of the prompt, and all that is generated.
    voted = server.cost(prompt(4), {"decode": {"policy": "pyramidkv", "budget": budget}})["decode"]
    kept = [budget + step for step in range(1, TOKENS)]
    assert voted["attended_ratio"] == pytest.approx(sum(kept) / sum(contexts), abs=1e-6)


def test_quoka_prefills_the_other_layers(server: Server) -> None:
    sparse = {"prefill": {"policy": "quoka", "budget": 64, "block": 64}}
    dense = {"prefill": {"policy": "quoka", "budget": 4096, "block": 64}}
    text = prompt(5)
    cost = server.cost(text, sparse)["prefill"]
    assert cost["tokens"] == PROMPT
    assert cost["attended_ratio"] < 1
    answer = server.answer(text, dense)
    assert answer["meta_info"]["attention"]["prefill"]["attended_ratio"] == 1
    assert max(server.reference.logit_gaps(text, answer["output_ids"])) < LOGIT_TOLERANCE


def test_prompts_are_not_released(server: Server) -> None:
    refused = server.ask(prompt(6), {"decode": {"policy": "snapkv", "release": True}})
    assert refused.status_code == 400
    assert "attention.decode.release: must be false: layer 0 has a sliding window" in refused.text


def test_a_layer_with_a_window_is_no_delta_layer(server: Server) -> None:
    refused = server.ask(prompt(6), {"decode": {"policy": "delta", "delta_layers": [3], "full_layers": 1}})
    assert refused.status_code == 400
    assert "layer 3 has a sliding window" in refused.text
