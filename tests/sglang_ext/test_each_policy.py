"""A server of whatever SGLang is installed starts, and answers a request of each policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_winnow import crossover
from tests.models import ModelShape, write_model, write_weights
from tests.policy_rows import small_policies
from tests.runtime import runtime_server
from tests.sglang_ext.answers import prompt_of

pytestmark = pytest.mark.timeout(600)

SHAPE = ModelShape(layers=3, query_heads=4, kv_heads=2, context_length=4096)
TOKENS = 6
PREFILL: dict[str, Any] = {"prefill": {"policy": "quoka", "budget": 128, "block": 64}}
SPARSE = {name: policy for name, policy in small_policies().items() if name != "dense"} | {"quoka prefill": PREFILL}


def test_each_policy_is_answered_and_dense_requests_do_not_notice(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", SHAPE)
    write_weights(model)
    prompt = prompt_of(500, 1, SHAPE.vocab_size)
    environment = {crossover.ENVIRONMENT: "0", "SGLANG_DEBUG_MEMORY_POOL": "1"}
    arguments = ["--chunked-prefill-size", "256", "--max-total-tokens", "4096"]
    with runtime_server(model, *arguments, log=tmp_path / "log", **environment) as runtime:
        alone = ask(runtime.url, prompt, {})
        for name, policy in SPARSE.items():
            cost = ask(runtime.url, prompt, policy)["meta_info"]["attention"]
            if name == "quoka prefill":
                assert cost["prefill"]["attended_ratio"] < 1, cost
            else:
                assert (cost["decode"]["policy"], cost["decode"]["dense_steps"]) == (name, 0), cost
        after = ask(runtime.url, prompt, {})
    assert alone["meta_info"]["attention"]["decode"]["attended_ratio"] == 1
    assert after["output_ids"] == alone["output_ids"]
    assert after["meta_info"]["attention"]["prefill"]["cached_tokens"] > 0


def ask(address: str, prompt: list[int], policy: Any) -> Any:
    parameters = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": parameters | {"custom_params": {"attention": json.dumps(policy)}}}
    return httpx.post(f"{address}/generate", json=body, timeout=240).raise_for_status().json()
