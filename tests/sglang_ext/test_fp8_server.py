"""A server whose KV cache has 8 bits a number: every policy acts, and attention is that of a wider cache, nearly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_winnow import crossover
from tests.models import ModelShape, write_model, write_weights
from tests.policy_rows import ROWS, small_policies
from tests.runtime import runtime_server
from tests.sglang_ext.answers import LOGPROBS, prompt_of

pytestmark = pytest.mark.timeout(600)

SHAPE = ModelShape(layers=3, query_heads=4, kv_heads=2, context_length=4096)
TOKENS = 6
PREFILL: dict[str, Any] = {"prefill": {"policy": "quoka", "budget": 128, "block": 64}}
SPARSE = {name: policy for name, policy in small_policies().items() if name != "dense"} | {"quoka prefill": PREFILL}
VERIFIED = {
    name: {"decode": {"policy": name, **ROWS[name].small}, "verify": {}} for name in ("quest", "verified_pages")
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses by the dtype of the KV cache; those of 8 bits verify."""
    folder = tmp_path_factory.mktemp("fp8")
    model = write_model(folder / "model", SHAPE)
    write_weights(model)
    environment = {crossover.ENVIRONMENT: "0", "SGLANG_DEBUG_MEMORY_POOL": "1"}
    arguments = ["--chunked-prefill-size", "256", "--max-total-tokens", "4096", "--attention-backend", "winnow"]
    with ExitStack() as stack:

        def start(name: str, *more: str) -> str:
            server = runtime_server(model, *arguments, *more, log=folder / name, **environment)
            return stack.enter_context(server).url

        narrow = ["--kv-cache-dtype", "fp8_e4m3", "--speculative-algorithm", "WINNOW"]
        yield {"fp8_e4m3": start("narrow", *narrow), "auto": start("wide")}


def ask(address: str, prompt: list[int], policy: Any) -> Any:
    parameters = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": parameters | {"custom_params": {"attention": json.dumps(policy)}}}
    return httpx.post(f"{address}/generate", json=body | LOGPROBS, timeout=240).raise_for_status().json()


def test_dense_answers_are_nearly_those_of_a_wider_cache(servers: dict[str, str]) -> None:
    for seed in range(3):
        prompt = prompt_of(300, seed, SHAPE.vocab_size)
        narrow, wide = (ask(servers[name], prompt, {}) for name in ("fp8_e4m3", "auto"))
        own, expected = (answer["meta_info"]["output_token_logprobs"][0][0] for answer in (narrow, wide))
        assert own == pytest.approx(expected, abs=0.4)
        assert own != expected


def test_every_policy_acts(servers: dict[str, str]) -> None:
    prompt = prompt_of(500, 1, SHAPE.vocab_size)
    alone = ask(servers["fp8_e4m3"], prompt, {})
    for name, policy in SPARSE.items():
        cost = ask(servers["fp8_e4m3"], prompt, policy)["meta_info"]["attention"]
        if name == "quoka prefill":
            assert cost["prefill"]["attended_ratio"] < 1, cost
        else:
            assert (cost["decode"]["policy"], cost["decode"]["dense_steps"]) == (name, 0), cost
    after = ask(servers["fp8_e4m3"], prompt, {})
    assert after["output_ids"] == alone["output_ids"]


@pytest.mark.parametrize("name", VERIFIED)
def test_verified_answers_are_those_of_dense_attention(name: str, servers: dict[str, str]) -> None:
    prompt = prompt_of(400, 2, SHAPE.vocab_size)
    dense = ask(servers["fp8_e4m3"], prompt, {})
    verified = ask(servers["fp8_e4m3"], prompt, VERIFIED[name])
    assert verified["output_ids"] == dense["output_ids"]
    assert verified["meta_info"]["attention"]["verify"]["verifications"] > 0


def test_codes_are_a_larger_part_of_what_is_read(servers: dict[str, str]) -> None:
    """The same tokens are half of the bytes in 8 bits, and an index of as many bytes weighs twice as much."""
    prompt = prompt_of(500, 3, SHAPE.vocab_size)
    policy = {"decode": {"policy": "lowbit_top_k", "budget": 100}}
    narrow, wide = (
        ask(servers[name], prompt, policy)["meta_info"]["attention"]["decode"] for name in ("fp8_e4m3", "auto")
    )
    assert narrow["kv_read_ratio"] > wide["kv_read_ratio"]


def test_no_log_of_a_server_has_an_error(servers: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    del servers
    for log in Path(tmp_path_factory.getbasetemp()).glob("fp8*/narrow"):
        assert "Traceback" not in log.read_text(errors="replace")
