"""Servers started with options that the table calls served: each request answers as on a server without them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_winnow.server_options import OPTIONS, Device
from tests.models import write_model, write_weights
from tests.sglang_ext.answers import TOLERANCE, TOLERANCE_OF_SELECTIONS, equal_steps, equal_tokens
from tests.sglang_ext.test_cpu_server import events
from tests.sglang_ext.test_policies_server import CHUNK, NAMES, SHAPE, Server, body, prompt_of, serve

EXAMPLES = {option.feature: option.example.split() for option in OPTIONS if Device.CPU in option.served_on}
REQUESTS = [(prompt_of(350 + 200 * (i % 3), seed=500 + i), name) for i, name in enumerate(NAMES)]
# As many as fit the pool: what is retracted is computed anew, otherwise.
AT_ONCE = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("options") / "model", SHAPE)
    write_weights(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    """Return what a server without options answers to each of ``REQUESTS`` alone."""
    with serve(model, model.parent / "log") as runtime:
        server = Server(runtime)
        return [server.alone(*request) for request in REQUESTS]


def assert_equal(answer: Any, wanted: Any, name: str) -> None:
    assert answer["meta_info"]["attention"]["retracted"] == 0
    equal_steps(answer, wanted, TOLERANCE if name == "dense" else TOLERANCE_OF_SELECTIONS)
    ours, theirs = (each["meta_info"]["attention"]["decode"] for each in (answer, wanted))
    assert {field: ours[field] for field in ("policy", "steps", "dense_steps", "context_tokens")} == {
        field: theirs[field] for field in ("policy", "steps", "dense_steps", "context_tokens")
    }
    assert ours["attended_ratio"] == pytest.approx(theirs["attended_ratio"], rel=0.05)


def test_every_option_that_is_served_is_tried_here() -> None:
    assert set(EXAMPLES) == {"data parallelism", "mixed chunks", "verification of drafts"}


# Two minutes: a server of two ranks is two servers to start.
@pytest.mark.full
def test_data_parallelism(model: Path, expected: list[Any], tmp_path: Path) -> None:
    with serve(model, tmp_path / "log", *EXAMPLES["data parallelism"]) as runtime:
        server = Server(runtime)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda request: server.ask(*request), REQUESTS))
        ranks = [answer["meta_info"]["dp_rank"] for answer in answers]
        assert min(ranks.count(0), ranks.count(1)) > len(REQUESTS) / 4
        for answer, wanted, (_, name) in zip(answers, expected, REQUESTS, strict=True):
            assert_equal(answer, wanted, name)
        states = server.http.get("/server_info").json()["internal_states"]
        assert len(states) == 2
        assert sum(state["winnow"]["requests_total"] for state in states) >= len(REQUESTS)


def test_verification_of_drafts(model: Path, expected: list[Any], tmp_path: Path) -> None:
    with serve(model, tmp_path / "log", *EXAMPLES["verification of drafts"]) as runtime:
        server = Server(runtime)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda request: server.ask(*request), REQUESTS))
    for answer, wanted, (_, name) in zip(answers, expected, REQUESTS, strict=True):
        assert_equal(answer, wanted, name)


@pytest.fixture(scope="module")
def mixing(model: Path) -> Iterator[Server]:
    with serve(model, model.parent / "log-mixed", *EXAMPLES["mixed chunks"]) as runtime:
        yield Server(runtime)


def without_logprobs(prompt: list[int], name: str, tokens: int) -> Any:
    # SGLang does not mix requests that ask for them.
    asked = body(prompt, name, tokens)
    return {key: value for key, value in asked.items() if key not in ("return_logprob", "top_logprobs_num")}


def test_mixed_chunks(mixing: Server, expected: list[Any]) -> None:
    def ask(index: int) -> Any:
        # Some ask for log-probabilities: passes that are mixed come behind others that are not.
        asked = (body if index % 4 == 0 else without_logprobs)(*REQUESTS[index], 12)
        return mixing.http.post("/generate", json=asked).raise_for_status().json()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, range(len(REQUESTS))))
    for answer, wanted, (_, name) in zip(answers, expected, REQUESTS, strict=True):
        equal_tokens(answer, wanted, TOLERANCE if name == "dense" else TOLERANCE_OF_SELECTIONS)
        ours, theirs = (each["meta_info"]["attention"]["decode"] for each in (answer, wanted))
        assert (ours["policy"], ours["steps"]) == (theirs["policy"], theirs["steps"])
        assert ours["attended_ratio"] == pytest.approx(theirs["attended_ratio"], rel=0.1)


@pytest.mark.parametrize("name", ["dense", "quest", "snapkv", "tactic", "delta"])
def test_requests_decode_while_another_is_prefilled_in_chunks(mixing: Server, name: str) -> None:
    mixing.flush()
    prompt = prompt_of(400, seed=41)
    alone = mixing.alone(prompt, name, 60)
    mixing.flush()
    asked = without_logprobs(prompt, name, 60) | {"stream": True}
    with ThreadPoolExecutor(1) as pool, mixing.http.stream("POST", "/generate", json=asked) as response:
        stream = events(response)
        next(stream)
        long = without_logprobs(prompt_of(12 * CHUNK, seed=42), "dense", 1)
        answered = pool.submit(lambda: mixing.http.post("/generate", json=long).is_success)
        received, before = [], 0
        for event in stream:
            received.append(event)
            before += not answered.done()
        assert answered.result()
    # A token for each chunk, where SGLang otherwise prefills all chunks first.
    assert before > 8
    equal_tokens(received[-1], alone, TOLERANCE if name == "dense" else TOLERANCE_OF_SELECTIONS)
