"""Exact answers from sparse drafts, over a server on the CPU."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from sglang_winnow.sglang_versions.releases import OLDEST, RUNNING
from tests.models import NEEDLE
from tests.runtime import Runtime, runtime_server
from winnow_kernels.policies.registry import DECODE_POLICIES

pytestmark = pytest.mark.skipif(RUNNING != OLDEST, reason="verification is served on the oldest release only")

TOKENS = 24
FIELDS: dict[str, dict[str, Any]] = {
    "streaming_llm": {"window": 32},
    "quest": {"budget": 48},
    "pyramidkv": {"budget": 160},
    "delta": {"budget": 160, "recency": 16},
    "tactic": {"p": 0.5},
    "lowbit_top_p": {"p": 0.5},
}
SPARSE = [name for name in DECODE_POLICIES if name != "dense"]
WORDS = "the river stone lamp green quiet under field amber north signal water cloud seven maple iron".split()


def prompt(seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(240))


def policy(name: str, drafts: int | None = None) -> dict[str, Any]:
    verified = {} if drafts is None else {"verify": {"draft_tokens": drafts}}
    return {"decode": {"policy": name, **FIELDS.get(name, {"budget": 64})}, **verified}


@pytest.fixture(scope="module", params=[[], ["--disable-overlap-schedule"]], ids=["overlap", "synchronous"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    log = tmp_path_factory.mktemp("verification") / "log"
    arguments = ["--attention-backend", "winnow", "--speculative-algorithm", "WINNOW", "--max-total-tokens", "16384"]
    with runtime_server(NEEDLE, *arguments, *request.param, log=log, WINNOW_CROSSOVER_TOKENS="0") as runtime:
        yield runtime


def ask(server: Runtime, text: str, attention: dict[str, Any] | None = None, **parameters: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, **parameters}
    if attention is not None:
        sampling["custom_params"] = {"attention": json.dumps(attention)}
    answer = httpx.post(f"{server.url}/generate", json={"text": text, "sampling_params": sampling}, timeout=120)
    answer.raise_for_status()
    result: dict[str, Any] = answer.json()
    return result


def test_every_policy_answers_as_dense_attention_does(server: Runtime) -> None:
    texts = [prompt(seed) for seed in range(2)]
    dense = [ask(server, text)["output_ids"] for text in texts]
    jobs = [(name, drafts, i) for name in SPARSE for drafts in (1, 4, 8) for i in range(2)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda job: ask(server, texts[job[2]], policy(job[0], job[1])), jobs))
    wrong = [job for job, answer in zip(jobs, answers, strict=True) if answer["output_ids"] != dense[job[2]]]
    assert wrong == []


def test_rows_that_are_not_verified_answer_as_they_would_alone(server: Runtime) -> None:
    text = prompt(7)
    asked: list[dict[str, Any] | None] = [None, *(policy(name) for name in ("quest", "streaming_llm", "snapkv"))]
    alone = [ask(server, text, attention)["output_ids"] for attention in asked]
    assert alone[2] != alone[0]
    verified = [policy("quest", drafts) for drafts in (3, 4, 5)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda attention: ask(server, text, attention)["output_ids"], [*asked, *verified]))
    assert answers == [*alone, *([alone[0]] * len(verified))]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 11])
def test_an_answer_ends_inside_a_draft(server: Runtime, limit: int) -> None:
    text = prompt(3)
    dense = ask(server, text)["output_ids"]
    short = ask(server, text, policy("quest", 4), max_new_tokens=limit)
    assert short["output_ids"] == dense[:limit]
    stop = dense[limit]
    ends = {"stop_token_ids": [stop], "ignore_eos": False}
    assert ask(server, text, policy("quest", 4), **ends)["output_ids"] == ask(server, text, **ends)["output_ids"]


def test_the_next_turn_reads_what_was_verified_from_the_cache(server: Runtime) -> None:
    text = prompt(11)
    first = ask(server, text, policy("streaming_llm", 4), max_new_tokens=48)
    turn = text + first["text"] + " and then the "
    warm = ask(server, turn)
    assert warm["meta_info"]["cached_tokens"] >= first["meta_info"]["prompt_tokens"] + 16
    httpx.post(f"{server.url}/flush_cache", timeout=30).raise_for_status()
    cold = ask(server, turn)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert cold["output_ids"] == warm["output_ids"]


def test_drafts_are_checked_greedily_only(server: Runtime) -> None:
    for parameters in ({"temperature": 0.7}, {"frequency_penalty": 0.5}, {"regex": "a+"}):
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            ask(server, "one", policy("quest", 4), **parameters)
