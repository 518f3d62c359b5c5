"""Exact answers from sparse drafts, over a server on the CPU."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from benchmarks.serving.server_plugins import NATIVE_LAYERS, python_path
from sglang_winnow import crossover
from sglang_winnow.dense_backend import DENSE_ENVIRONMENT, TRITON
from tests.models import NEEDLE
from tests.runtime import Runtime, runtime_server
from winnow_kernels.contract.explanation import PARAMETER as EXPLAIN
from winnow_kernels.policies.registry import DECODE_POLICIES
from winnow_service.models.cache import models_folder

TOKENS = 24
# Seconds for 400 answers of 128 tokens.
LONG = 7200
FIELDS: dict[str, dict[str, Any]] = {
    "streaming_llm": {"window": 32},
    "quest": {"budget": 48},
    "verified_pages": {"budget": 64, "recency": 16},
    "pyramidkv": {"budget": 160},
    "delta": {"budget": 160, "recency": 16},
    "tactic": {"p": 0.5},
    "lowbit_top_p": {"p": 0.5},
}
SPARSE = [name for name in DECODE_POLICIES if name != "dense"]
WORDS = "the river stone lamp green quiet under field amber north signal water cloud seven maple iron".split()


WINNOW = ["--attention-backend", "winnow"]
VERIFYING = [*WINNOW, "--speculative-algorithm", "WINNOW"]


def in_float32() -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment of a server in float32: on CUDA all must be told so."""
    if not torch.cuda.is_available():
        return [], {}
    arguments = ["--dtype", "float32", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
    return arguments, {
        "PYTHONPATH": python_path(NATIVE_LAYERS),
        "TRITON_F32_DEFAULT": "ieee",
        DENSE_ENVIRONMENT: TRITON,
    }


@dataclass(frozen=True)
class Server:
    http: httpx.Client


@contextmanager
def client(runtime: Runtime, seconds: float = 300) -> Iterator[Server]:
    with httpx.Client(base_url=runtime.url, timeout=seconds) as http:
        yield Server(http)


def prompt(seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(240))


def policy(name: str, drafts: int | str | None = None) -> dict[str, Any]:
    verified = {} if drafts is None else {"verify": {"draft_tokens": drafts}}
    return {"decode": {"policy": name, **FIELDS.get(name, {"budget": 64})}, **verified}


SYNCHRONOUS = pytest.param(["--disable-overlap-schedule"], marks=pytest.mark.full, id="synchronous")


# Without overlap, ``test_each_policy`` has a server verify in the short tests.
@pytest.fixture(scope="module", params=[pytest.param([], id="overlap"), SYNCHRONOUS])
def scheduling(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def server(scheduling: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("verification") / "log"
    arguments = [*VERIFYING, "--grammar-backend", "llguidance", "--max-total-tokens", "16384", *scheduling]
    with (
        runtime_server(NEEDLE, *arguments, log=log, WINNOW_CROSSOVER_TOKENS="0") as runtime,
        client(runtime) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def plain(scheduling: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("plain") / "log"
    with (
        runtime_server(NEEDLE, *WINNOW, *scheduling, log=log, WINNOW_CROSSOVER_TOKENS="0") as runtime,
        client(runtime) as server,
    ):
        yield server


def body_of(
    text: str, attention: Mapping[str, Any] | None = None, *, logprobs: bool = False, **parameters: Any
) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, **parameters}
    if attention is not None:
        sampling["custom_params"] = {"attention": json.dumps(attention)}
    body: dict[str, Any] = {"text": text, "sampling_params": sampling}
    if logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [3, 40]}
    return body


def ask(server: Server, text: str, attention: Mapping[str, Any] | None = None, **asked: Any) -> Any:
    return server.http.post("/generate", json=body_of(text, attention, **asked)).raise_for_status().json()


def streamed(server: Server, body: dict[str, Any]) -> list[Any]:
    """Return what a streamed answer had come to at each of its events."""
    with server.http.stream("POST", "/generate", json=body | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


LOGPROBS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


def assert_the_same(answer: Any, expected: Any) -> None:
    """Assert that two answers have the same tokens, and log-probabilities that differ by rounding."""
    assert answer["output_ids"] == expected["output_ids"]
    for name in LOGPROBS:
        got, wanted = (told["meta_info"][name] for told in (answer, expected))
        assert len(got) == len(wanted) == len(expected["output_ids"])
        np.testing.assert_allclose(logprobs_of(got), logprobs_of(wanted), atol=1e-4)


# Two minutes on two free cores, and more than twice as long beside another server.
@pytest.mark.timeout(900)
def test_every_policy_answers_as_dense_attention_does(server: Server) -> None:
    texts = [prompt(seed) for seed in range(2)]
    dense = [ask(server, text)["output_ids"] for text in texts]
    jobs = [(name, drafts, i % 2) for name in SPARSE for i, drafts in enumerate((1, 4, 8, "auto"))]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda job: ask(server, texts[job[2]], policy(job[0], job[1])), jobs))
    wrong = [job for job, answer in zip(jobs, answers, strict=True) if answer["output_ids"] != dense[job[2]]]
    assert wrong == []


@pytest.mark.full
@pytest.mark.timeout(LONG)
@pytest.mark.parametrize("name", ["needle", "smollm2"])
def test_long_answers_are_those_of_dense_attention(name: str, tmp_path: Path) -> None:
    """200 prompts of 128 tokens; each policy drafts 1, 4 and 8 tokens, or as many as pay, for five of them or more."""
    if name == "needle":
        model = NEEDLE
    else:
        subprocess.run([Path(sys.executable).with_name("winnow"), "models", "get", name], check=True)
        model = models_folder() / name
    own, environment = in_float32()
    arguments = [*VERIFYING, "--max-total-tokens", "32768", *own]
    environment |= {crossover.ENVIRONMENT: "0"}
    kinds = [(kind, drafts) for kind in SPARSE for drafts in (1, 4, 8, "auto")]
    with (
        runtime_server(model, *arguments, log=tmp_path / "log", **environment) as runtime,
        client(runtime, LONG) as server,
        ThreadPoolExecutor(8) as pool,
    ):

        def is_dense(number: int) -> bool:
            text = prompt(number)
            found = ask(server, text, policy(*kinds[number % len(kinds)]), max_new_tokens=128)["output_ids"]
            return bool(found == ask(server, text, max_new_tokens=128)["output_ids"])

        equal = list(pool.map(is_dense, range(200)))
    assert [kinds[number % len(kinds)] for number, found in enumerate(equal) if not found] == []


def test_rows_that_are_not_verified_answer_as_they_would_alone(server: Server) -> None:
    text = prompt(7)
    released = {"decode": {"policy": "snapkv", "budget": 64, "release": True}}
    terminated = policy("tactic") | {"early_termination": {"scale": 0.2, "direction": 0.2, "patience": 1}}
    audited = policy("quest") | {"audit": 0.5}
    asked: list[dict[str, Any] | None] = [None, policy("quest"), policy("streaming_llm"), released, terminated, audited]
    alone = [ask(server, text, attention)["output_ids"] for attention in asked]
    assert alone[2] != alone[0]
    verified = [policy("quest", drafts) for drafts in (3, 4, 5)]
    drawn = {"temperature": 0.7, "top_k": 1}
    jobs: list[tuple[dict[str, Any] | None, dict[str, Any]]] = [(attention, {}) for attention in [*asked, *verified]]
    jobs += [(None, drawn), (None, {"presence_penalty": 0.0, "logprobs": True})]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(lambda job: ask(server, text, job[0], **job[1])["output_ids"], jobs))
    assert answers == [*alone, *([alone[0]] * (len(verified) + 2))]


@pytest.mark.parametrize("first", ["verified", "dense"])
def test_rows_that_are_not_verified_get_tokens_one_by_one(server: Server, first: str) -> None:
    text = prompt(8)
    dense = ask(server, text, max_new_tokens=160)["output_ids"]
    attentions = {"verified": policy("quest", 8), "dense": None}
    with ThreadPoolExecutor(2) as pool:
        order = sorted(attentions, key=lambda name: name != first)
        bodies = {name: body_of(text, attentions[name], max_new_tokens=160) for name in order}
        found = {name: pool.submit(streamed, server, body) for name, body in bodies.items()}
        events = {name: each.result() for name, each in found.items()}
    grown = {}
    for name, told in events.items():
        assert told[-1]["output_ids"] == dense
        grown[name] = [len(after["output_ids"]) - len(before["output_ids"]) for before, after in pairwise(told)]
    # What comes while the process that answers is busy goes out together.
    assert grown["dense"].count(1) > 0.9 * len(grown["dense"])
    assert min(grown["verified"]) > 0
    verify = events["verified"][-1]["meta_info"]["attention"]["verify"]
    assert verify["drafted"] > 4 * verify["verifications"]
    # The last check may have come to more tokens than the answer has.
    assert 159 <= verify["verifications"] + verify["accepted"] + verify["dense_steps"] < 159 + 9


def test_rows_leave_while_others_draft(server: Server) -> None:
    text, beside = prompt(10), body_of(prompt(31), max_new_tokens=2000) | {"stream": True}
    dense = ask(server, text, max_new_tokens=160)["output_ids"]
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(ask, server, text, policy("quest", 8), max_new_tokens=160)
        for events in (3, 10, 5):
            with server.http.stream("POST", "/generate", json=beside) as response:
                lines = response.iter_lines()
                for _ in range(2 * events):
                    next(lines)
        answer = verified.result()
    assert answer["output_ids"] == dense


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_answers_are_those_of_requests_alone_whoever_comes_and_goes(server: Server) -> None:
    draw = random.Random(5)
    texts = [prompt(seed) for seed in range(60, 66)]
    plain = [None, policy("quest"), policy("streaming_llm"), policy("tactic")]
    numbers: list[int | str] = [1, 2, 4, 8, 16, "auto"]
    jobs = []
    for _ in range(160):
        verified = policy(draw.choice(SPARSE), draw.choice(numbers))
        jobs.append(
            (draw.choice(texts), draw.choice([verified, draw.choice(plain)]), draw.randint(1, 96), draw.random())
        )

    def answered(job: tuple[str, dict[str, Any] | None, int, float]) -> list[int] | None:
        text, attention, tokens, chance = job
        body = body_of(text, attention, max_new_tokens=tokens)
        if chance > 0.2:
            return list(streamed(server, body)[-1]["output_ids"])
        with server.http.stream("POST", "/generate", json=body | {"stream": True}) as response:
            for _, _line in zip(range(tokens), response.iter_lines(), strict=False):
                pass
        return None

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(answered, jobs))
    alone = {}
    for text in texts:
        for attention in plain:
            key = (text, json.dumps(attention))
            alone[key] = ask(server, text, attention, max_new_tokens=96)["output_ids"]
    wrong = []
    for job, answer in zip(jobs, answers, strict=True):
        text, attention, tokens, _ = job
        own = None if attention is not None and "verify" in attention else attention
        if answer is not None and answer != alone[text, json.dumps(own)][:tokens]:
            wrong.append(job[1:])
    assert wrong == []


def test_steps_beside_drafts_are_explained_as_they_would_be_alone(server: Server) -> None:
    text = prompt(11)
    body = body_of(text, policy("quest"))
    body["sampling_params"]["custom_params"][EXPLAIN] = '{"steps": [1, 9, 20], "layers": [2], "heads": [0, 1]}'

    def explained() -> Any:
        answer = server.http.post("/generate", json=body).raise_for_status().json()
        return answer["meta_info"]["attention"]["explain"]

    alone = explained()
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(ask, server, text, policy("quest", 8), max_new_tokens=160)
        beside = explained()
        verified.result()
    assert (alone["missing_steps"], beside["missing_steps"]) == ([], [])
    assert [entry["step"] for entry in alone["entries"]] == [1, 1, 9, 9, 20, 20]
    for entry, expected in zip(beside["entries"], alone["entries"], strict=True):
        assert entry["attended"] == expected["attended"]
        np.testing.assert_allclose(entry["weights"], expected["weights"], atol=1e-4)


def test_next_tokens_beside_drafts_are_compared_as_they_would_be_alone(server: Server) -> None:
    text, asked = prompt(12), policy("quest") | {"audit": {"share": 1.0, "kl": True}}
    alone = ask(server, text, asked, max_new_tokens=60)
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(ask, server, text, policy("quest", 8), max_new_tokens=160)
        beside = ask(server, text, asked, max_new_tokens=60)
        verified.result()
    assert beside["output_ids"] == alone["output_ids"]
    found, expected = (answer["meta_info"]["attention"]["audit"] for answer in (beside, alone))
    assert expected["steps"] == 59
    # Under overlap a step behind the end of an answer counts, too.
    assert 59 <= found["steps"] <= 60
    assert expected["next_token_kl"] > 1e-5
    assert found["next_token_kl"] == pytest.approx(expected["next_token_kl"], rel=0.2)


def test_an_answer_beside_drafts_ends_where_it_would_alone(server: Server) -> None:
    text, others = prompt(9), policy("quest", 8)
    dense = ask(server, text, max_new_tokens=60)["output_ids"]
    stop = [token for place, token in enumerate(dense) if token not in dense[:place]][-1]
    assert dense.index(stop) > 1
    ends: list[dict[str, Any]] = [{"stop_token_ids": [stop], "ignore_eos": False}, {"max_new_tokens": 21}]
    alone = [ask(server, text, **{"max_new_tokens": 60, **end})["output_ids"] for end in ends]
    with ThreadPoolExecutor(3) as pool:
        long = pool.submit(ask, server, text, others, max_new_tokens=200)
        answers = [pool.submit(ask, server, text, **{"max_new_tokens": 60, **end}) for end in ends]
        assert [answer.result()["output_ids"] for answer in answers] == alone
        long.result()


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 11])
def test_an_answer_ends_inside_a_draft(server: Server, limit: int) -> None:
    text = prompt(3)
    dense = ask(server, text)["output_ids"]
    short = ask(server, text, policy("quest", 4), max_new_tokens=limit)
    assert short["output_ids"] == dense[:limit]
    stop = dense[limit]
    ends: dict[str, Any] = {"stop_token_ids": [stop], "ignore_eos": False}
    assert ask(server, text, policy("quest", 4), **ends)["output_ids"] == ask(server, text, **ends)["output_ids"]


def test_the_next_turn_reads_what_was_verified_from_the_cache(server: Server) -> None:
    text = prompt(11)
    first = ask(server, text, policy("streaming_llm", 4), max_new_tokens=48)
    turn = text + first["text"] + " and then the "
    warm = ask(server, turn)
    assert warm["meta_info"]["cached_tokens"] >= first["meta_info"]["prompt_tokens"] + 16
    server.http.post("/flush_cache", params={"timeout": 30}).raise_for_status()
    cold = ask(server, turn)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert cold["output_ids"] == warm["output_ids"]


def test_the_answer_tells_what_drafts_and_checks_cost(server: Server) -> None:
    text = prompt(13)
    everything = {"decode": {"policy": "streaming_llm", "window": 4096}, "verify": {"draft_tokens": 4}}
    told = ask(server, text, everything, max_new_tokens=21)
    prompt_tokens, cost = told["meta_info"]["prompt_tokens"], told["meta_info"]["attention"]
    contexts = range(prompt_tokens + 1, prompt_tokens + 21)
    # A window that holds the context is no draft.
    assert cost["verify"] == {
        "verifications": 0,
        "drafted": 0,
        "accepted": 0,
        "tokens_per_verification": None,
        "dense_steps": len(contexts),
    }
    assert cost["decode"]["steps"] == cost["decode"]["dense_steps"] == len(contexts)
    assert cost["decode"]["kv_read_ratio"] == 1

    window = {"decode": {"policy": "streaming_llm", "sinks": 4, "window": 60}, "verify": {"draft_tokens": 4}}
    told = ask(server, text, window, max_new_tokens=21)["meta_info"]["attention"]
    verify, decode = told["verify"], told["decode"]
    assert decode["steps"] == len(contexts)
    assert decode["context_tokens"] == contexts[-1]
    # The last token needs no draft.
    assert decode["dense_steps"] == verify["dense_steps"] <= 1
    assert 0 < verify["accepted"] <= verify["drafted"] <= 4 * verify["verifications"]
    of_each = 1 + verify["accepted"] / verify["verifications"]
    assert verify["tokens_per_verification"] == pytest.approx(of_each, abs=1e-6)
    # Drafts read 64 tokens each; a check reads a context of at most the longest, and four more.
    whole = verify["verifications"] + verify["dense_steps"]
    reads = 64 * verify["drafted"] + np.array([contexts[0], contexts[-1] + 4]) * whole
    lowest, highest = reads / sum(contexts)
    assert lowest <= decode["attended_ratio"] == decode["kv_read_ratio"] <= highest


def test_metrics_count_what_stands(server: Server) -> None:
    def counted() -> dict[str, float]:
        totals = server.http.get("/server_info").json()["internal_states"][0]["winnow"]
        return {name: totals[f"{name}_total"] for name in ("verifications", "drafted_tokens", "accepted_tokens")}

    before = counted()
    verify = ask(server, prompt(17), policy("quest", 4))["meta_info"]["attention"]["verify"]
    gained = {name: count - before[name] for name, count in counted().items()}
    assert gained == {
        "verifications": verify["verifications"],
        "drafted_tokens": verify["drafted"],
        "accepted_tokens": verify["accepted"],
    }


def test_who_does_not_ask_is_answered_as_on_any_other_server(server: Server, plain: Server) -> None:
    text = prompt(19)
    parameters: list[dict[str, Any]] = [
        {},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        # With others it depends on the process which one comes first.
        {"repetition_penalty": 1.3},
        {"min_new_tokens": TOKENS, "ignore_eos": False},
        {"logit_bias": {"20": 5.0}},
    ]
    for attention in (None, policy("quest")):
        for more in parameters:
            expected, answer = (ask(asked, text, attention, logprobs=True, **more) for asked in (plain, server))
            assert_the_same(answer, expected)
            assert answer["meta_info"]["attention"] == expected["meta_info"]["attention"]


def test_a_logit_bias_is_as_without(server: Server) -> None:
    bias: dict[str, Any] = {"logit_bias": {"20": 100.0}}
    assert ask(server, prompt(3), policy("quest", 4), **bias)["output_ids"] == [20] * TOKENS


@pytest.mark.parametrize("draws", [400, pytest.param(20_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("temperature", [1.0, pytest.param(4.0, marks=pytest.mark.full)])
def test_sampled_answers_have_the_distribution_of_dense_decoding(
    server: Server, temperature: float, draws: int
) -> None:
    text, tokens, choices = prompt(56), 4, 2
    expected = sequences(server, text, tokens, choices, temperature)
    assert sum(expected.values()) == pytest.approx(1)
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": choices, "max_new_tokens": tokens, "n": 100}
    counts: Counter[tuple[int, ...]] = Counter()
    stood = 0
    for _ in range(draws // 100):
        answers = ask(server, text, policy("quest", 3), **sampling)
        counts.update(tuple(answer["output_ids"]) for answer in answers)
        stood += sum(answer["meta_info"]["attention"]["verify"]["accepted"] for answer in answers)
    assert counts.keys() <= expected.keys()
    assert 0 < stood < 3 * draws
    # Rare ones together: the test needs some of each.
    often = [sequence for sequence, share in expected.items() if share * draws >= 5]
    rare = 1 - sum(expected[sequence] for sequence in often)
    observed = [counts[sequence] for sequence in often]
    shares = [expected[sequence] for sequence in often]
    if rare > 1e-9:
        observed.append(draws - sum(observed))
        shares.append(rare)
    assert len(observed) > 4
    assert chance_of(observed, np.array(shares) * draws) > 1e-6


def test_an_aborted_answer_leaves_the_others_alone(server: Server) -> None:
    text = prompt(29)
    alone = ask(server, text)["output_ids"]
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}
    sampling["custom_params"] = {"attention": json.dumps(policy("quest", 8))}
    body = {"text": prompt(31), "sampling_params": sampling, "stream": True}
    with server.http.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())
        assert ask(server, text, policy("snapkv", 4))["output_ids"] == alone
    server.http.post("/flush_cache", params={"timeout": 30}).raise_for_status()
    assert ask(server, text, policy("quest", 4))["output_ids"] == alone


REGEX = "(river|lamp) [0-9]{1,4} (stone|green)[a-z ]{3,30}"
JSON = json.dumps(
    {
        "type": "object",
        "properties": {"river": {"enum": ["green", "stone"]}, "lamp": {"type": "integer", "maximum": 99}},
        "required": ["river", "lamp"],
        "additionalProperties": False,
    }
)
EARLY = {"ignore_eos": False, "stop_token_ids": list(range(200))}
PARAMETERS: dict[str, dict[str, Any]] = {
    "none": {},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.6},
    "minimum": {"min_new_tokens": 9, **EARLY},
    "together": {
        "frequency_penalty": 0.5,
        "presence_penalty": 0.7,
        "repetition_penalty": 1.2,
        "min_new_tokens": 7,
        "logit_bias": {"20": 3.0},
        **EARLY,
    },
    "regex": {"regex": REGEX, "ignore_eos": False},
    "ebnf": {"ebnf": 'root ::= "river " [a-z]+ " green"', "ignore_eos": False},
    "json": {"json_schema": JSON, "ignore_eos": False, "frequency_penalty": 1.0, "min_new_tokens": 5},
}


@contextmanager
def beside_a_dense_answer(server: Server) -> Iterator[None]:
    """Have a request decode densely all the while, so that others draft in steps."""
    body = body_of(prompt(31), max_new_tokens=8000) | {"stream": True}
    with server.http.stream("POST", "/generate", json=body) as response, ThreadPoolExecutor(1) as pool:
        lines = response.iter_lines()
        next(lines)
        ended = Event()
        reading = pool.submit(lambda: next(filter(lambda _line: ended.is_set(), lines)))
        yield
        assert not reading.done()
        ended.set()
        assert reading.result()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("beside", [nullcontext, beside_a_dense_answer])
def test_sampling_parameters_are_as_without(server: Server, beside: Callable[..., Any]) -> None:
    text = prompt(1)
    dense = {name: ask(server, text, logprobs=True, **asked) for name, asked in PARAMETERS.items()}
    told = {json.dumps([answer["meta_info"][name] for name in LOGPROBS]) for answer in dense.values()}
    # Each makes a difference.
    assert len(told) == len(PARAMETERS)
    assert re.fullmatch(REGEX, dense["regex"]["text"])
    attentions = [policy("quest", 1), policy("streaming_llm", 4), policy("snapkv", 8)]
    jobs: list[tuple[str, dict[str, Any] | None]]
    jobs = [(name, attention) for name in PARAMETERS for attention in attentions]
    # Beside them, rows that are not verified, whose penalties would depend on when others are prefilled.
    jobs += [(name, None) for name in ("none", "regex", "ebnf", "none")]
    random.Random(0).shuffle(jobs)
    with beside(server), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda job: ask(server, text, job[1], logprobs=True, **PARAMETERS[job[0]]), jobs))
    stood: Counter[str] = Counter()
    for (name, attention), answer in zip(jobs, answers, strict=True):
        assert_the_same(answer, dense[name])
        if attention is not None:
            stood[name] += answer["meta_info"]["attention"]["verify"]["accepted"]
    assert stood.keys() == PARAMETERS.keys()
    assert all(stood.values())


def test_log_probabilities_of_a_stream_end_where_the_answer_does(server: Server) -> None:
    text = prompt(3)
    stop = ask(server, text)["output_ids"][5]
    ends: dict[str, Any] = {"stop_token_ids": [stop], "ignore_eos": False}
    expected = ask(server, text, logprobs=True, **ends)
    *_, last = streamed(server, body_of(text, policy("quest", 4), logprobs=True, **ends))
    assert_the_same(last, expected)


def test_sampled_answers_obey_their_grammar(server: Server) -> None:
    sampling: dict[str, Any] = {"temperature": 1.5, "regex": "[a-z]{1,3}( [0-9]{2}){3}", "ignore_eos": False, "n": 20}
    answers = ask(server, prompt(5), policy("quest", 4), max_new_tokens=64, **sampling)
    assert all(re.fullmatch(sampling["regex"], answer["text"]) for answer in answers)
    assert len({answer["text"] for answer in answers}) > 1


def test_what_is_not_served_with_verification_is_refused(server: Server) -> None:
    body = body_of("one", policy("quest", 4)) | {"return_hidden_states": True}
    refusal = server.http.post("/generate", json=body)
    assert refusal.status_code == 400
    assert "return_hidden_states: is not served with attention.verify" in refusal.text


@pytest.mark.timeout(900)
def test_retracted_requests_are_answered_as_dense_attention_does(tmp_path: Path) -> None:
    # Room is not kept for what requests will generate, so that some are retracted.
    arguments = [*VERIFYING, "--max-total-tokens", "1024", "--schedule-conservativeness", "0.01"]
    settings = {"WINNOW_CROSSOVER_TOKENS": "0", "SGLANG_DEBUG_MEMORY_POOL": "1"}
    with runtime_server(NEEDLE, *arguments, log=tmp_path / "log", **settings) as runtime, client(runtime) as server:
        tokens = 80
        texts = [" ".join(prompt(seed).split()[:45]) for seed in range(40, 52)]
        sampling: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": False, "stop_token_ids": [0]}
        # What SGLang has counted of an answer is lost when it is retracted.
        sampling |= {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_new_tokens": tokens // 2}
        plain = {"max_new_tokens": tokens, "ignore_eos": True}
        asked = [(policy(SPARSE[i % len(SPARSE)], 4), sampling) if i % 3 else (None, plain) for i in range(len(texts))]
        with ThreadPoolExecutor(len(texts)) as pool:
            jobs = []
            for text, (attention, own) in zip(texts, asked, strict=True):
                jobs.append(pool.submit(ask, server, text, attention, **own))
                # One after another: for those that it admits together, SGLang keeps room for all they may generate.
                time.sleep(0.1)
            answers = [job.result() for job in jobs]
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
        for text, (_, own), answer in zip(texts, asked, answers, strict=True):
            assert answer["output_ids"] == ask(server, text, **own)["output_ids"]
            steps = answer["meta_info"]["attention"]["decode"]["steps"]
            missed = len(answer["output_ids"]) - 1 - steps
            assert 0 <= missed <= answer["meta_info"]["num_retractions"]
        server.http.post("/flush_cache", params={"timeout": 30}).raise_for_status()


def chance_of(observed: list[int], expected: Any) -> float:
    """Return how probable it is that counts are as far from those expected, by the chi-square test."""
    distance = float(((np.array(observed) - expected) ** 2 / expected).sum())
    freedom = len(observed) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(distance / 2).double()))


def logprobs_of(told: Any) -> list[float]:
    if isinstance(told, list):
        return [number for part in told for number in logprobs_of(part)]
    return [told] if isinstance(told, float) else []


def sequences(server: Server, text: str, tokens: int, choices: int, temperature: float) -> dict[tuple[int, ...], float]:
    """Return how probable each continuation is in dense decoding, of the ``choices`` most probable tokens each."""
    shares: dict[tuple[int, ...], float] = {(): 1.0}
    prefix = server.http.post("/tokenize", json={"prompt": text}).raise_for_status().json()["tokens"]
    for _ in range(tokens):
        longer: dict[tuple[int, ...], float] = {}
        for sequence, share in shares.items():
            body = {
                "input_ids": [*prefix, *sequence],
                "sampling_params": {"temperature": 0, "max_new_tokens": 1},
                "return_logprob": True,
                "top_logprobs_num": choices,
            }
            told = server.http.post("/generate", json=body).raise_for_status().json()["meta_info"]
            logs = np.array([entry[0] for entry in told["output_top_logprobs"][0]]) / temperature
            weights = np.exp(logs - logs.max())
            for entry, weight in zip(told["output_top_logprobs"][0], weights / weights.sum(), strict=True):
                longer[*sequence, entry[1]] = share * float(weight)
        shares = longer
    return shares
