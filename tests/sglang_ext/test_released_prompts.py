"""``release``: answers are those of the same policy without it, and the memory of prompts comes back while they run."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_winnow.server_information import PARAMETER
from tests.models import ModelShape, write_model, write_weights
from tests.policy_rows import VOTED
from tests.runtime import runtime_server
from tests.sglang_ext.answers import LOGPROBS, equal_steps, prompt_of
from tests.sglang_ext.conftest import ENVIRONMENT

SHAPE = ModelShape(layers=5, query_heads=4, kv_heads=2, context_length=4096)
PAGE, CHUNK, KV_TOKENS, TOKENS = 16, 512, 4096, 16
# The same attention to the same tokens in the same order.
TOLERANCE = 1e-5


class Server:
    def __init__(self, http: httpx.Client, log: Path) -> None:
        self.http, self.log = http, log

    def ask(self, prompt: list[int], policy: Any, tokens: int = TOKENS) -> Any:
        answer = self.http.post("/generate", json=body(prompt, policy, tokens))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def together(self, requests: list[tuple[list[int], Any]], tokens: int = TOKENS) -> list[Any]:
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda request: self.ask(request[0], request[1], tokens), requests))

    def flush(self) -> None:
        """Empty the cache, which SGLang does only when no request holds a slot of it."""
        self.http.post("/flush_cache", params={"timeout": 30}).raise_for_status()

    def used_tokens(self, expected: int) -> int:
        """Return how many tokens the pool holds; SGLang tells it as of a moment ago, so that it is waited for."""
        deadline = time.monotonic() + 10
        while True:
            used = int(self.http.get("/v1/loads").raise_for_status().json()["loads"][0]["num_used_tokens"])
            if used == expected or time.monotonic() > deadline:
                return used
            time.sleep(0.1)


def body(prompt: list[int], policy: Any, tokens: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    parameters["custom_params"] = {PARAMETER: json.dumps(policy)}
    return {"input_ids": prompt, "sampling_params": parameters} | LOGPROBS


def voted(name: str, *, release: bool, budget: int = 96, **others: Any) -> dict[str, Any]:
    decode = {"policy": name, "budget": budget, "observation_window": 16, "release": release}
    return {"decode": decode, **others}


OTHERS = ("--disable-overlap-schedule", "--disable-radix-cache")
FULL = [pytest.param([flag], marks=pytest.mark.full) for flag in OTHERS]


@pytest.fixture(scope="module", params=[[], *FULL], ids=str)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("released")
    model = write_model(folder / "model", SHAPE)
    write_weights(model)
    arguments = ["--attention-backend", "winnow", "--max-total-tokens", str(KV_TOKENS), *request.param]
    arguments += ["--chunked-prefill-size", str(CHUNK), "--page-size", str(PAGE)]
    with (
        runtime_server(model, *arguments, log=folder / "log", **ENVIRONMENT) as runtime,
        httpx.Client(base_url=runtime.url, timeout=120) as http,
    ):
        yield Server(http, runtime.log)
    assert "Remaining number of requests 0" in (folder / "log").read_text()


def prompt(length: int, seed: int) -> list[int]:
    return prompt_of(length, seed, SHAPE.vocab_size)


@pytest.mark.parametrize("name", VOTED)
@pytest.mark.parametrize("others", [{}, {"early_termination": {}}], ids=["", "early termination"])
def test_answers_are_those_without_release(server: Server, name: str, others: Any) -> None:
    for seed, length in enumerate((200, 611)):
        server.flush()
        kept = server.ask(prompt(length, seed), voted(name, release=False, **others))
        server.flush()
        released = server.ask(prompt(length, seed), voted(name, release=True, **others))
        assert equal_steps(released, kept, TOLERANCE) == TOKENS
        cost, without = (one["meta_info"]["attention"]["decode"] for one in (released, kept))
        assert without.pop("released_tokens") is None
        given_back = cost.pop("released_tokens")
        # SnapKV has the same budget in each layer, of whole pages here; the others keep more than that somewhere.
        most = length // PAGE * PAGE - 96
        assert given_back == most if name == "snapkv" else 0 <= given_back <= most
        assert given_back % PAGE == 0
        assert given_back > 0 or length == 200
        assert cost == without


def test_the_memory_comes_back_while_the_request_runs(server: Server) -> None:
    server.flush()
    with server.http.stream(
        "POST", "/generate", json=body(prompt(2048, 7), voted("snapkv", release=True), 1000) | {"stream": True}
    ) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        for _ in range(20):
            next(lines)
        used = int(server.http.get("/v1/loads").raise_for_status().json()["loads"][0]["num_used_tokens"])
        assert 96 <= used < 1200
    assert server.used_tokens(0) == 0
    server.flush()


def test_more_requests_run_at_once(server: Server) -> None:
    # A prompt takes nearly half of the pool: without release two run at once.
    requests = [(prompt(1900, seed), voted("snapkv", release=True)) for seed in range(4)]
    server.flush()
    alone = [server.ask(*request, 100) for request in requests]
    server.flush()
    before = len(server.log.read_text())
    for one, other in zip(server.together(requests, 100), alone, strict=True):
        assert equal_steps(one, other, 1e-3) > 0
        assert one["meta_info"]["attention"]["retracted"] == 0
    running = map(int, re.findall(r"Decode batch.*?#running-req: (\d+)", server.log.read_text()[before:]))
    assert max(running) > 2
    assert server.used_tokens(0) == 0
    server.flush()


def test_requests_beside_it_are_as_alone(server: Server) -> None:
    policies: list[Any] = [{}, voted("snapkv", release=False), *(voted(name, release=True) for name in VOTED)]
    policies += [{"decode": {"policy": "quest", "budget": 64}}, {"decode": {"policy": "lowbit_top_k", "budget": 64}}]
    requests = [(prompt(500 + 30 * seed, seed % 3), policy) for seed, policy in enumerate(policies)]
    alone = []
    for request in requests:
        server.flush()
        alone.append(server.ask(*request))
    server.flush()
    for one, other in zip(server.together(requests), alone, strict=True):
        assert equal_steps(one, other, 2e-3) > 0
    server.flush()
    assert server.used_tokens(0) == 0
