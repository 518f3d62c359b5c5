"""SGLang with the CPU platform, as a user starts it, against transformers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models import ModelShape, write_model, write_weights
from tests.runtime import Runtime, runtime_server
from tests.sglang_ext.reference import Reference

CHUNK = 256
PAGE = 16
KV_TOKENS = 2048
LOGIT_TOLERANCE = 1e-3  # the logits' standard deviation is about 1
VOCABULARY = ModelShape().vocab_size


class Server:
    """The server under test, and what it must answer."""

    def __init__(self, runtime: Runtime, reference: Reference) -> None:
        self.runtime = runtime
        self.reference = reference
        self.http = httpx.Client(base_url=runtime.url, timeout=120)

    def generate(self, prompt: list[int], tokens: int) -> Any:
        return self.http.post("/generate", json=request(prompt, tokens)).raise_for_status().json()

    def generate_at_once(self, prompts: list[list[int]], tokens: int) -> Any:
        return self.http.post("/generate", json=request(prompts, tokens)).raise_for_status().json()

    def settings(self) -> Any:
        return self.http.get("/server_info").raise_for_status().json()

    def assert_greedy(self, prompt: list[int], answer: Any, tokens: int) -> None:
        assert len(answer["output_ids"]) == tokens
        assert max(self.reference.logit_gaps(prompt, answer["output_ids"])) < LOGIT_TOLERANCE

    def assert_answers(self) -> None:
        prompt = random_prompt(seed=99, length=20)
        self.assert_greedy(prompt, self.generate(prompt, 4), 4)


def request(prompt: list[int] | list[list[int]], tokens: int, **more: object) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    } | more


def random_prompt(*, seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(2, VOCABULARY), k=length)


def events(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("runtime")
    model = write_model(folder / "model", ModelShape())
    write_weights(model)
    arguments = ["--chunked-prefill-size", str(CHUNK), "--max-total-tokens", str(KV_TOKENS)]
    # Admits requests without keeping room for the tokens that they will generate, so that some are retracted.
    arguments += ["--schedule-conservativeness", "0.01"]
    with runtime_server(model, *arguments, log=folder / "log", SGLANG_DEBUG_MEMORY_POOL="1") as runtime:
        yield Server(runtime, Reference(model))


def test_platform_fills_in_what_the_command_line_left_open(server: Server) -> None:
    settings = server.settings()
    expected = {
        "device": "cpu",
        "page_size": PAGE,
        "attention_backend": "winnow",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "dtype": "float32",
        "chunked_prefill_size": CHUNK,
        "max_total_num_tokens": KV_TOKENS,
        "disable_radix_cache": False,
        "disable_overlap_schedule": False,
    }
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, CHUNK, 3 * CHUNK + 37])
def test_greedy_tokens_are_those_of_transformers(server: Server, length: int) -> None:
    prompt = random_prompt(seed=length, length=length)
    answer = server.generate(prompt, 2 * PAGE + 3)
    assert answer["meta_info"]["prompt_tokens"] == length
    server.assert_greedy(prompt, answer, 2 * PAGE + 3)


def test_long_prompts_are_prefilled_in_chunks(server: Server) -> None:
    server.generate(random_prompt(seed=1, length=4 * CHUNK), 1)
    prefilled = [int(count) for count in re.findall(r"#new-token: (\d+)", server.runtime.log.read_text())]
    assert prefilled.count(CHUNK) >= 4
    assert max(prefilled) == CHUNK


def test_second_request_reuses_the_whole_pages_of_a_shared_prefix(server: Server) -> None:
    prefix = random_prompt(seed=2, length=500)
    first, second = (prefix + random_prompt(seed=seed, length=40) for seed in (3, 4))
    assert server.generate(first, 8)["meta_info"]["cached_tokens"] == 0
    answer = server.generate(second, 8)
    assert answer["meta_info"]["cached_tokens"] == 500 // PAGE * PAGE
    server.assert_greedy(second, answer, 8)


def test_next_turn_reuses_generated_tokens(server: Server) -> None:
    prompt = random_prompt(seed=5, length=100)
    turn = prompt + server.generate(prompt, 70)["output_ids"] + random_prompt(seed=6, length=10)
    answer = server.generate(turn, 8)
    assert answer["meta_info"]["cached_tokens"] == (100 + 70) // PAGE * PAGE
    server.assert_greedy(turn, answer, 8)


def test_streaming_sends_tokens_as_they_come(server: Server) -> None:
    prompt = random_prompt(seed=7, length=50)
    with server.http.stream("POST", "/generate", json=request(prompt, 40, stream=True)) as response:
        received = list(events(response))
    counts = [event["meta_info"]["completion_tokens"] for event in received]
    assert len(counts) > 10
    assert counts == sorted(counts)
    assert counts[0] < 10
    assert received[-1]["meta_info"]["finish_reason"]["type"] == "length"
    server.assert_greedy(prompt, received[-1], 40)


def test_abort_ends_a_running_request(server: Server) -> None:
    body = request(random_prompt(seed=8, length=50), 1800, stream=True, rid="to-be-aborted")
    with server.http.stream("POST", "/generate", json=body) as response:
        stream = events(response)
        next(stream)
        httpx.post(f"{server.runtime.url}/abort_request", json={"rid": "to-be-aborted"}).raise_for_status()
        last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] < 1800
    server.assert_answers()


def test_requests_in_one_batch_do_not_disturb_each_other(server: Server) -> None:
    prompts = [random_prompt(seed=seed, length=10 + 47 * (seed - 20)) for seed in range(20, 28)]
    for prompt, answer in zip(prompts, server.generate_at_once(prompts, 24), strict=True):
        server.assert_greedy(prompt, answer, 24)


def test_eviction_makes_room_in_a_full_cache(server: Server) -> None:
    prompts = [random_prompt(seed=seed, length=600) for seed in range(30, 30 + 2 * KV_TOKENS // 600)]
    for prompt, answer in zip(prompts, server.generate_at_once(prompts, 8), strict=True):
        server.assert_greedy(prompt, answer, 8)
    server.assert_answers()


def test_retracted_requests_are_answered_in_full(server: Server) -> None:
    tokens = 250
    prompts = [random_prompt(seed=seed, length=50) for seed in range(50, 50 + 3 * KV_TOKENS // 2 // (50 + tokens))]
    # For requests that ignore the end of a text later releases keep room for all that they may generate.
    parameters = {"ignore_eos": False, "min_new_tokens": tokens}
    with ExitStack() as stack:
        streams = []
        for prompt in prompts:
            # One after another: for those that it admits together, SGLang keeps room for all that they may generate.
            body = request(prompt, tokens, stream=True)
            body["sampling_params"] |= parameters
            streams.append(events(stack.enter_context(server.http.stream("POST", "/generate", json=body))))
            next(streams[-1])
        answers = [list(stream)[-1] for stream in streams]
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        body = request(prompt, tokens)
        body["sampling_params"] |= parameters
        alone = server.http.post("/generate", json=body).raise_for_status().json()
        assert answer["output_ids"] == alone["output_ids"]
    server.assert_answers()


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_is_served_too(tmp_path: Path, family: Any) -> None:
    model = write_model(tmp_path / "model", ModelShape(family=family))
    write_weights(model)
    with runtime_server(model, "--chunked-prefill-size", str(CHUNK), log=tmp_path / "log") as runtime:
        server = Server(runtime, Reference(model))
        prompt = random_prompt(seed=1, length=2 * CHUNK + 5)
        server.assert_greedy(prompt, server.generate(prompt, 24), 24)
