"""Prompts that are released on a server whose kernels Triton interprets: as on the torch path, while others run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_winnow import crossover
from tests.models import ModelShape, write_model, write_weights
from tests.policy_rows import VOTED
from tests.runtime import runtime_server
from tests.sglang_ext.answers import LOGPROBS, TOLERANCE_OF_SELECTIONS, equal_steps, prompt_of
from tests.sglang_ext.test_device_server import assert_equal_costs, interpreted
from tests.sglang_ext.test_policies_retraction import events

# Each token of each request is a second or so of interpreted kernels.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

SHAPE = ModelShape(layers=3, query_heads=4, kv_heads=2, context_length=2048)
PAGE, CHUNK = 16, 256


class Server:
    def __init__(self, http: httpx.Client, log: Path) -> None:
        self.http, self.log = http, log

    def ask(self, length: int, policy: Mapping[str, Any], tokens: int) -> Any:
        return self.http.post("/generate", json=_body(length, policy, tokens)).raise_for_status().json()

    def together(self, asked: Sequence[tuple[int, Mapping[str, Any]]], tokens: int) -> list[Any]:
        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(lambda one: self.ask(one[0], one[1], tokens), asked))

    def is_empty(self) -> bool:
        """Empty the cache, which SGLang does only when no request holds a slot of it; return whether it is empty."""
        self.http.post("/flush_cache", params={"timeout": 60}).raise_for_status()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            [load] = self.http.get("/v1/loads").raise_for_status().json()["loads"]
            if load["num_used_tokens"] == 0:
                return True
            time.sleep(0.2)
        return False


def _body(length: int, policy: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    # For requests that ignore the end of a text later releases keep room for all that they may generate.
    parameters: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "min_new_tokens": tokens}
    parameters["custom_params"] = {"attention": json.dumps(policy)}
    prompt = prompt_of(length, length, SHAPE.vocab_size)
    return {"input_ids": prompt, "sampling_params": parameters} | LOGPROBS


@contextmanager
def _serve(folder: Path, name: str, kv_tokens: int, *more: str, **environment: str) -> Iterator[Server]:
    model = folder / "model"
    if not model.exists():
        write_weights(write_model(model, SHAPE))
    arguments = ["--attention-backend", "winnow", "--chunked-prefill-size", str(CHUNK), "--page-size", str(PAGE)]
    arguments += ["--max-total-tokens", str(kv_tokens), "--max-running-requests", "8", *more]
    environment[crossover.ENVIRONMENT] = "0"
    log = folder / f"{name}.log"
    with (
        runtime_server(model, *arguments, log=log, **environment) as runtime,
        httpx.Client(base_url=runtime.url, timeout=900) as http,
    ):
        yield Server(http, log)
    # The scheduler has ended by itself, and SGLang's check of its idle memory has found nothing.
    assert "Remaining number of requests 0" in log.read_text()


def _voted(name: str, *, release: bool, budget: int = 96, **others: Any) -> dict[str, Any]:
    decode = {"policy": name, "budget": budget, "observation_window": 16, "release": release}
    return {"decode": decode, **others}


def _cost(answer: Any) -> dict[str, Any]:
    cost: dict[str, Any] = answer["meta_info"]["attention"]
    return cost


RELEASED: list[dict[str, Any]] = [
    *(_voted(name, release=True) for name in VOTED),
    _voted("ada_snapkv", release=True, early_termination={"scale": 0.2, "direction": 0.2, "patience": 1}),
]
BESIDE: list[Mapping[str, Any]] = [_voted("snapkv", release=False), {}, {"decode": {"policy": "quest", "budget": 64}}]
TOKENS = 4


@pytest.mark.parametrize("options", [[], ["--disable-overlap-schedule"], ["--disable-radix-cache"]], ids=str)
def test_answers_and_what_is_given_back_are_those_of_the_torch_path(options: list[str], tmp_path: Path) -> None:
    together = [(450 + 37 * number, policy) for number, policy in enumerate([*RELEASED, *BESIDE])]
    found = []
    for name, environment in (("torch", {}), ("device", interpreted())):
        with _serve(tmp_path, name, 8192, *options, **environment) as server:
            kept = [
                server.ask(611, policy | {"decode": policy["decode"] | {"release": False}}, TOKENS)
                for policy in RELEASED
            ]
            assert server.is_empty()
            # The second time the prompt begins with what a dense request has left in the cache.
            alone = [server.ask(611, policy, TOKENS) for policy in RELEASED]
            server.ask(611, {}, 1)
            alone += [server.ask(611, policy, TOKENS) for policy in RELEASED]
            found.append([*kept, *alone, *server.together(together, TOKENS)])
            assert server.is_empty()
    for own, wanted in zip(found[1], found[0], strict=True):
        assert equal_steps(own, wanted, TOLERANCE_OF_SELECTIONS) == TOKENS
        assert_equal_costs(_cost(own), _cost(wanted))
    count = len(RELEASED)
    for own, without in zip(found[1][count : 2 * count], found[1][:count], strict=True):
        assert equal_steps(own, without, TOLERANCE_OF_SELECTIONS) == TOKENS
    given_back = [_cost(answer)["decode"]["released_tokens"] for answer in found[1]]
    assert given_back[:count] == [None] * count
    assert given_back[count] == 608 - 96
    assert all(tokens > 0 for tokens in given_back[count : 2 * count])
    assert all(tokens > 0 for tokens in given_back[3 * count : 4 * count])
    assert given_back[4 * count :] == [None] * len(BESIDE)


def test_who_is_retracted_is_released_anew(tmp_path: Path) -> None:
    """Three prompts fit into the cache one after another, but not what their answers grow to."""
    tokens, kv_tokens = 60, 352
    asked = [(112, _voted(name, release=True, budget=48)) for name in VOTED]
    with _serve(tmp_path, "torch", 1024) as server:
        alone = [server.ask(*one, tokens) for one in asked]
    with _serve(tmp_path, "device", kv_tokens, "--schedule-conservativeness", "0", **interpreted()) as server:
        with ExitStack() as stack:
            streams = []
            for one in asked:
                # For those that it admits together, SGLang keeps room for all they may generate.
                body = _body(*one, tokens) | {"stream": True}
                response = stack.enter_context(server.http.stream("POST", "/generate", json=body))
                streams.append(events(response))
                next(streams[-1])
            found = [list(stream)[-1] for stream in streams]
        assert server.is_empty()
    for own, wanted in zip(found, alone, strict=True):
        # Of who was retracted, generated tokens are prefilled: they see all of each other, and of the prompt.
        assert _cost(own)["retracted"] or equal_steps(own, wanted, TOLERANCE_OF_SELECTIONS) == tokens
        assert own["meta_info"]["completion_tokens"] == tokens
        assert _cost(own)["decode"]["released_tokens"] > 0
    assert sum(_cost(answer)["retracted"] for answer in found) > 0


def test_requests_that_end_or_are_aborted_give_everything_back(tmp_path: Path) -> None:
    """At their first token, with overlap in one more pass, which releases; and while they run."""
    with _serve(tmp_path, "device", 4096, **interpreted()) as server:
        asked = [(300 + 16 * number, _voted(VOTED[number % 3], release=True)) for number in range(3)]
        for tokens in (1, 2, 3):
            server.together(asked, tokens)
            assert server.is_empty()
        with server.http.stream(
            "POST", "/generate", json=_body(700, asked[0][1], 200) | {"stream": True, "rid": "aborted"}
        ) as response:
            told = events(response)
            for _ in range(4):
                next(told)
            [load] = server.http.get("/v1/loads").raise_for_status().json()["loads"]
            assert load["num_used_tokens"] < 400
            server.http.post("/abort_request", json={"rid": "aborted"}).raise_for_status()
            list(told)
        assert server.is_empty()
