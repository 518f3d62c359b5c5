"""Sparse requests that SGLang retracts for want of memory: each is answered in full, and nothing of them stays."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from sglang_winnow import crossover
from sglang_winnow.server_information import PARAMETER
from tests.models import ModelShape, write_model, write_weights
from tests.policy_rows import small_policies
from tests.runtime import runtime_server
from tests.sglang_ext.answers import LOGPROBS, equal_steps, prompt_of

SHAPE = ModelShape(layers=5, query_heads=4, kv_heads=2, context_length=4096)
KV_TOKENS = 2048
PROMPT = 100
TOKENS = 250
TOLERANCE = 2e-3

TERMINATION = {"scale": 0.2, "direction": 0.2, "patience": 1}
POLICIES: dict[str, dict[str, Any]] = small_policies() | {
    "streaming_llm": {"decode": {"policy": "streaming_llm", "sinks": 4, "window": 32}},
    "quest": {"decode": {"policy": "quest", "budget": 64, "full_layers": 1}},
    "snapkv": {"decode": {"policy": "snapkv", "budget": 48, "observation_window": 16}},
    "pyramidkv": {"decode": {"policy": "pyramidkv", "budget_ratio": 0.5, "observation_window": 16}},
    "delta": {"decode": {"policy": "delta", "budget": 64, "recency": 16, "delta_layers": [2, 4]}},
    "tactic": {"decode": {"policy": "tactic", "p": 0.7, "max_tokens": 64, "full_layers": 0}},
    "quoka": {"decode": {"policy": "quoka", "budget": 48}},
    "lowbit_top_k": {
        "decode": {"policy": "lowbit_top_k", "budget": 100},
        "prefill": {"policy": "quoka", "budget": 32, "block": 64},
    },
    "snapkv, released": {"decode": {"policy": "snapkv", "budget": 48, "observation_window": 16, "release": True}},
    "quoka prefill": {
        "decode": {"policy": "snapkv", "budget": 48, "observation_window": 16},
        "prefill": {"policy": "quoka", "budget": 32, "block": 64},
    },
    "tactic, terminated": {
        "decode": {"policy": "tactic", "p": 0.9, "max_tokens": 128, "full_layers": 1},
        "early_termination": TERMINATION,
    },
}


class Server:
    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def ask(self, prompt: list[int], policy: str, tokens: int = TOKENS) -> Any:
        return self.http.post("/generate", json=body(prompt, policy, tokens)).raise_for_status().json()

    def ask_until_some_are_retracted(self, requests: list[tuple[list[int], str]]) -> list[Any]:
        with ExitStack() as stack:
            streams = []
            for prompt, policy in requests:
                # One after another: for those that it admits together, SGLang keeps room for all they may generate.
                streamed = body(prompt, policy, TOKENS) | {"stream": True}
                streams.append(events(stack.enter_context(self.http.stream("POST", "/generate", json=streamed))))
                next(streams[-1])
            return [list(stream)[-1] for stream in streams]

    def flush(self) -> None:
        """Empty the cache, which SGLang does only when no request holds a slot of it."""
        self.http.post("/flush_cache", params={"timeout": 30}).raise_for_status()

    def used_tokens(self) -> int:
        """Return how many tokens the cache holds; SGLang tells it as of a moment ago, so that 0 is waited for."""
        deadline = time.monotonic() + 10
        while True:
            used = int(self.http.get("/v1/loads").raise_for_status().json()["loads"][0]["num_used_tokens"])
            if used == 0 or time.monotonic() > deadline:
                return used
            time.sleep(0.1)


def body(prompt: list[int], policy: str, tokens: int) -> dict[str, Any]:
    # For requests that ignore the end of a text later releases keep room for all that they may generate.
    parameters = {"temperature": 0, "max_new_tokens": tokens, "min_new_tokens": tokens}
    custom = {"custom_params": {PARAMETER: json.dumps(POLICIES[policy])}}
    return {"input_ids": prompt, "sampling_params": parameters | custom} | LOGPROBS


def events(response: httpx.Response) -> Iterator[Any]:
    # Nothing but a line feed ends an event; in text there may be what ends a line elsewhere, such as U+0085.
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def prompt_number(number: int, length: int = PROMPT) -> list[int]:
    return prompt_of(length, number, SHAPE.vocab_size)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("retraction")
    model = write_model(folder / "model", SHAPE)
    write_weights(model)
    # Admits requests without keeping room for the tokens that they will generate, so that some are retracted.
    arguments = ["--max-total-tokens", str(KV_TOKENS), "--schedule-conservativeness", "0.01"]
    settings = {crossover.ENVIRONMENT: "0", "SGLANG_DEBUG_MEMORY_POOL": "1"}
    with (
        runtime_server(model, *arguments, log=folder / "log", **settings) as runtime,
        httpx.Client(base_url=runtime.url, timeout=240) as http,
    ):
        yield Server(http)


@pytest.mark.parametrize("rotation", [0, pytest.param(5, marks=pytest.mark.full)])
def test_retracted_requests_are_answered_in_full(server: Server, rotation: int) -> None:
    names = list(POLICIES)
    names = names[rotation:] + names[:rotation]
    control = prompt_number(99, 700)
    server.flush()
    before = server.ask(control, "dense", 12)
    server.flush()

    requests = [(prompt_number(100 * rotation + i), name) for i, name in enumerate(names)]
    answers = server.ask_until_some_are_retracted(requests)
    retracted = {
        name for (_, name), answer in zip(requests, answers, strict=True) if answer["meta_info"]["num_retractions"]
    }
    assert retracted - {"dense"}
    for (_, name), answer in zip(requests, answers, strict=True):
        information = answer["meta_info"]
        cost = information["attention"]
        assert len(information["output_token_logprobs"]) == TOKENS
        assert information["finish_reason"]["type"] == "length"
        assert cost["retracted"] == information["num_retractions"]
        # The first token comes from prefill, and so does the first after each retraction: the decode step that it
        # takes the place of has been run and counted if the next batch was made before its result came.
        assert TOKENS - 1 - cost["retracted"] <= cost["decode"]["steps"] <= TOKENS - 1
        assert cost["decode"]["context_tokens"] == PROMPT + TOKENS - 1
        # Replayed tokens are none of the prompt's.
        assert cost["prefill"]["tokens"] == PROMPT
        ratio = cost["decode"]["attended_ratio"]
        assert ratio == 1 if name == "dense" else 0 < ratio < 1, (name, cost)

    # Whoever was not retracted never noticed.
    for (prompt, name), answer in zip(requests, answers, strict=True):
        if name not in retracted:
            server.flush()
            assert equal_steps(answer, server.ask(prompt, name), TOLERANCE) > 0, name
    server.flush()
    assert server.used_tokens() == 0
    assert equal_steps(server.ask(control, "dense", 12), before, TOLERANCE) > 0


def test_a_dense_answer_does_not_depend_on_retracted_sparse_ones(server: Server) -> None:
    """The tokens of a retracted sparse request are prefilled anew: they are no dense request's prefix."""
    prompts = [prompt_number(300 + i) for i in range(8)]
    names = ["streaming_llm", "tactic"] * 4
    answers = server.ask_until_some_are_retracted(list(zip(prompts, names, strict=True)))
    retracted = [i for i, answer in enumerate(answers) if answer["meta_info"]["num_retractions"]]
    assert retracted
    for i in retracted[:3]:
        assert len(answers[i]["output_ids"]) == TOKENS
        conversation = prompts[i] + answers[i]["output_ids"] + prompt_number(400, 30)
        after = server.ask(conversation, "dense", 12)
        server.flush()
        assert equal_steps(after, server.ask(conversation, "dense", 12), TOLERANCE) > 0
