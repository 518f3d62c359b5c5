"""Without a policy, a server with Winnow answers as SGLang's ``torch_native`` attention backend does."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models import ModelShape, write_model, write_weights
from tests.runtime import runtime_server
from tests.sglang_ext.answers import LOGPROBS, equal_steps, prompt_of

# Each test starts two servers.
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

TOKENS = 12
AT_ONCE = 6
LONGEST = 1500
SHAPE = ModelShape(layers=5, query_heads=4, kv_heads=2, context_length=4096)

# How a request says that it wants dense attention.
DENSE: tuple[Any, ...] = ({}, {"decode": {"policy": "dense"}}, {"prefill": {"policy": "dense"}})


def prompts_of(count: int, seed: int) -> list[list[int]]:
    """Return prompts of which about half begin like another."""
    rng = random.Random(seed)
    beginnings = [prompt_of(rng.randint(1, LONGEST - 1), rng.getrandbits(32), SHAPE.vocab_size) for _ in range(4)]
    prompts = []
    for _ in range(count):
        beginning = rng.choice(beginnings)[: rng.randint(0, LONGEST - 1)] if rng.random() < 0.5 else []
        rest = prompt_of(rng.randint(1, LONGEST - len(beginning)), rng.getrandbits(32), SHAPE.vocab_size)
        prompts.append(beginning + rest)
    return prompts


def ask(http: httpx.Client, prompt: list[int], policy: Any) -> Any:
    parameters: dict[str, Any] = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    if policy is not None:
        parameters["custom_params"] = {"attention": json.dumps(policy)}
    body = {"input_ids": prompt, "sampling_params": parameters} | LOGPROBS
    return http.post("/generate", json=body).raise_for_status().json()


def answers_of(
    model: Path, dtype: str, backend: str, prompts: list[list[int]], rounds: Sequence[Iterable[Any]], log: Path
) -> list[list[Any]]:
    """Return the answers of each round, which has a policy for each prompt; several are asked at once."""
    # The CPU platform's own choice would be float32 for every model.
    arguments = ["--dtype", dtype, "--attention-backend", backend]
    arguments += ["--chunked-prefill-size", "512", "--max-total-tokens", "8192"]
    with (
        runtime_server(model, *arguments, log=log, SGLANG_DEBUG_MEMORY_POOL="1") as runtime,
        httpx.Client(base_url=runtime.url, timeout=240) as http,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        assert http.get("/server_info").json()["attention_backend"] == backend
        answers = []
        for policies in rounds:
            http.post("/flush_cache", params={"timeout": 30}).raise_for_status()
            answers.append(list(pool.map(partial(ask, http), prompts, policies)))
        return answers


def compare(folder: Path, shape: ModelShape, count: int, tolerance: float, followed_share: float = 0.9) -> None:
    model = write_model(folder / "model", shape)
    write_weights(model)
    prompts = prompts_of(count, seed=1)
    none, dense = [None] * count, list(islice(cycle(DENSE), count))
    [expected] = answers_of(model, shape.dtype, "torch_native", prompts, [none], folder / "torch_native.log")
    for answers in answers_of(model, shape.dtype, "winnow", prompts, [none, dense], folder / "winnow.log"):
        followed = [equal_steps(ours, theirs, tolerance) for ours, theirs in zip(answers, expected, strict=True)]
        # After two tokens that are about equally likely, the answers are of different texts.
        assert sum(followed) > followed_share * count * TOKENS


def test_equal_tokens(tmp_path: Path) -> None:
    compare(tmp_path, SHAPE, 100, tolerance=1e-3)


@pytest.mark.parametrize(
    ("shape", "tolerance", "followed_share"),
    [
        pytest.param(ModelShape(layers=5, query_heads=4, kv_heads=2, dtype="bfloat16"), 0.2, 0.5, id="bfloat16"),
        pytest.param(ModelShape(layers=5, query_heads=4, kv_heads=4), 1e-3, 0.9, id="MHA"),
        pytest.param(ModelShape(layers=5, query_heads=4, kv_heads=1), 1e-3, 0.9, id="MQA"),
        pytest.param(ModelShape(family="gemma3_text", layers=6, kv_heads=2), 1e-3, 0.9, id="sliding windows"),
    ],
)
def test_equal_tokens_of_other_shapes(
    tmp_path: Path, shape: ModelShape, tolerance: float, followed_share: float
) -> None:
    compare(tmp_path, shape, 20, tolerance, followed_share)
