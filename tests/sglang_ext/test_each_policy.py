"""A server of whatever SGLang is installed starts, and answers a request of each policy; so does one that verifies."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_winnow import crossover
from tests.models import ModelShape, write_model, write_weights
from tests.policy_rows import small_policies
from tests.runtime import Runtime, runtime_server
from tests.sglang_ext.answers import LOGPROBS, TOLERANCE, equal_tokens, prompt_of

pytestmark = pytest.mark.timeout(600)

SHAPE = ModelShape(layers=3, query_heads=4, kv_heads=2, context_length=4096)
TOKENS = 6
PREFILL: dict[str, Any] = {"prefill": {"policy": "quoka", "budget": 128, "block": 64}}
SPARSE = {name: policy for name, policy in small_policies().items() if name != "dense"}


def test_each_policy_is_answered_and_dense_requests_do_not_notice(tmp_path: Path) -> None:
    prompt = prompt_of(500, 1, SHAPE.vocab_size)
    with serve(tmp_path) as runtime:
        alone = ask(runtime.url, prompt, {})
        for name, policy in (SPARSE | {"quoka prefill": PREFILL}).items():
            cost = ask(runtime.url, prompt, policy)["meta_info"]["attention"]
            if name == "quoka prefill":
                assert cost["prefill"]["attended_ratio"] < 1, cost
            else:
                assert (cost["decode"]["policy"], cost["decode"]["dense_steps"]) == (name, 0), cost
        after = ask(runtime.url, prompt, {})
    assert alone["meta_info"]["attention"]["decode"]["attended_ratio"] == 1
    assert after["output_ids"] == alone["output_ids"]
    assert after["meta_info"]["attention"]["prefill"]["cached_tokens"] > 0


# With overlap, ``test_verification_server`` has a server verify in the short tests.
@pytest.mark.parametrize(
    "scheduling",
    [
        pytest.param([], marks=pytest.mark.full, id="overlap"),
        pytest.param(["--disable-overlap-schedule"], id="synchronous"),
    ],
)
def test_verified_answers_of_each_policy_are_those_of_dense_attention(tmp_path: Path, scheduling: list[str]) -> None:
    prompt = prompt_of(500, 1, SHAPE.vocab_size)
    with serve(tmp_path, "--speculative-algorithm", "WINNOW", *scheduling) as runtime:
        dense = ask(runtime.url, prompt, {}, **LOGPROBS)
        for name, policy in SPARSE.items():
            answer = ask(runtime.url, prompt, policy | {"verify": {"draft_tokens": 3}})
            assert equal_tokens(answer, dense, TOLERANCE) == TOKENS, name
            cost = answer["meta_info"]["attention"]
            assert cost["decode"]["policy"] == name
            assert cost["verify"]["verifications"] > 0, cost


def serve(folder: Path, *arguments: str) -> AbstractContextManager[Runtime]:
    model = write_model(folder / "model", SHAPE)
    write_weights(model)
    environment = {crossover.ENVIRONMENT: "0", "SGLANG_DEBUG_MEMORY_POOL": "1"}
    arguments = ("--chunked-prefill-size", "256", "--max-total-tokens", "4096", *arguments)
    return runtime_server(model, *arguments, log=folder / "log", **environment)


def ask(address: str, prompt: list[int], policy: Any, **more: Any) -> Any:
    parameters = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": parameters | {"custom_params": {"attention": json.dumps(policy)}}}
    return httpx.post(f"{address}/generate", json=body | more, timeout=240).raise_for_status().json()
