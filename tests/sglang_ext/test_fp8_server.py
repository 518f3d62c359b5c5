"""A server whose KV cache has 8 bits a number: every policy acts, and attention is that of a wider cache, nearly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sglang_winnow import crossover
from tests.models import ModelShape, write_model, write_weights
from tests.policy_rows import ROWS, small_policies
from tests.runtime import runtime_server
from tests.sglang_ext.answers import LOGPROBS, prompt_of
from tests.sglang_ext.reference import NARROW, Reference
from tests.sglang_ext.test_caps_and_sinks import CAPS, SINKS
from tests.sglang_ext.test_caps_and_sinks import POLICIES as OF_FULL_LAYERS

pytestmark = pytest.mark.timeout(600)

SHAPE = ModelShape(layers=3, query_heads=4, kv_heads=2, context_length=4096)
TOKENS = 6
# Of gpt-oss's shape rounding sends tokens to experts with other weights.
LOGPROB_TOLERANCE = 5e-3
PREFILL: dict[str, Any] = {"prefill": {"policy": "quoka", "budget": 128, "block": 64}}
SPARSE = {name: policy for name, policy in small_policies().items() if name != "dense"} | {"quoka prefill": PREFILL}
VERIFIED = {
    name: {"decode": {"policy": name, **ROWS[name].small}, "verify": {}} for name in ("quest", "verified_pages")
}


# Each reads all that there is, in a way of its own.
COVERED: dict[str, Any] = {
    "early termination": {"early_termination": {"scale": 0.0001, "direction": 0.0001, "patience": 1000}},
    "quoka prefill": {"prefill": {"policy": "quoka", "budget": 4096, "block": 64}},
    "lowbit_top_p": {"decode": {"policy": "lowbit_top_p", "p": 0.9999}},
}


@dataclass(frozen=True)
class Servers:
    """Addresses of servers of one model.

    Attributes:
        narrow: keeps keys and values in 8 bits, and verifies.
        wide: keeps them as wide as the model computes.
        narrow_reference: what the narrow one answers densely.
        wide_reference: what the wide one does.
        policies: that act on layers of the model, by name.
    """

    narrow: str
    wide: str
    narrow_reference: Reference
    wide_reference: Reference
    policies: dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((SHAPE, SPARSE), id="plain"),
        pytest.param((SINKS, OF_FULL_LAYERS | {"quoka prefill": PREFILL}), id="sinks", marks=pytest.mark.full),
        pytest.param((CAPS, OF_FULL_LAYERS | {"quoka prefill": PREFILL}), id="caps", marks=pytest.mark.full),
    ],
)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    shape, policies = request.param
    folder = tmp_path_factory.mktemp("fp8")
    model = write_model(folder / "model", shape)
    write_weights(model)
    environment = {crossover.ENVIRONMENT: "0", "SGLANG_DEBUG_MEMORY_POOL": "1"}
    arguments = ["--chunked-prefill-size", "256", "--max-total-tokens", "4096", "--attention-backend", "winnow"]
    with ExitStack() as stack:

        def start(name: str, *more: str) -> str:
            server = runtime_server(model, *arguments, *more, log=folder / name, **environment)
            return stack.enter_context(server).url

        narrow = ["--kv-cache-dtype", "fp8_e4m3", "--speculative-algorithm", "WINNOW"]
        yield Servers(
            start("narrow", *narrow), start("wide"), Reference(model, NARROW), Reference(model, "eager"), policies
        )


def ask(address: str, prompt: list[int], policy: Any) -> Any:
    parameters = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": parameters | {"custom_params": {"attention": json.dumps(policy)}}}
    return httpx.post(f"{address}/generate", json=body | LOGPROBS, timeout=240).raise_for_status().json()


def logprobs(answer: Any) -> list[float]:
    return [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]


def test_dense_answers_are_those_of_keys_and_values_in_8_bits(servers: Servers) -> None:
    for seed in range(3):
        prompt = prompt_of(300, seed, SHAPE.vocab_size)
        answer = ask(servers.narrow, prompt, {})
        ids, own = answer["output_ids"], np.array(logprobs(answer))
        narrow, wide = (
            np.abs(own - reference.logprobs(prompt, ids)).max()
            for reference in (servers.narrow_reference, servers.wide_reference)
        )
        assert narrow < LOGPROB_TOLERANCE
        assert narrow < wide / 4
        assert max(servers.narrow_reference.logit_gaps(prompt, ids)) < LOGPROB_TOLERANCE


def test_every_policy_acts(servers: Servers) -> None:
    prompt = prompt_of(500, 1, SHAPE.vocab_size)
    alone = ask(servers.narrow, prompt, {})
    for name, policy in servers.policies.items():
        cost = ask(servers.narrow, prompt, policy)["meta_info"]["attention"]
        if name == "quoka prefill":
            assert cost["prefill"]["attended_ratio"] < 1, cost
        else:
            assert (cost["decode"]["policy"], cost["decode"]["dense_steps"]) == (name, 0), cost
    after = ask(servers.narrow, prompt, {})
    assert after["output_ids"] == alone["output_ids"]


@pytest.mark.parametrize("name", COVERED)
def test_what_reads_everything_answers_as_dense_attention(name: str, servers: Servers) -> None:
    prompt = prompt_of(400, 4, SHAPE.vocab_size)
    dense, covered = ask(servers.narrow, prompt, {}), ask(servers.narrow, prompt, COVERED[name])
    assert covered["output_ids"] == dense["output_ids"]
    for own, expected in zip(*(logprobs(answer) for answer in (covered, dense)), strict=True):
        assert own == pytest.approx(expected, abs=0.01)


def test_next_tokens_are_compared_and_what_is_stored_stays(servers: Servers) -> None:
    prompt, audit = prompt_of(400, 5, SHAPE.vocab_size), {"audit": {"share": 1.0, "kl": True}}
    sparse: Any = {"decode": {"policy": "streaming_llm", "window": 64}}
    # The first to ask prefills what the others find in the cache.
    ask(servers.narrow, prompt, sparse)
    compared, plain = ask(servers.narrow, prompt, sparse | audit), ask(servers.narrow, prompt, sparse)
    assert logprobs(compared) == logprobs(plain)
    lost, nothing = (
        answer["meta_info"]["attention"]["audit"]["next_token_kl"]
        for answer in (compared, ask(servers.narrow, prompt, COVERED["early termination"] | audit))
    )
    assert nothing < 1e-5 < lost


@pytest.mark.parametrize("name", VERIFIED)
def test_verified_answers_are_those_of_dense_attention(name: str, servers: Servers) -> None:
    prompt = prompt_of(400, 2, SHAPE.vocab_size)
    dense = ask(servers.narrow, prompt, {})
    verified = ask(servers.narrow, prompt, VERIFIED[name])
    assert verified["output_ids"] == dense["output_ids"]
    assert verified["meta_info"]["attention"]["verify"]["verifications"] > 0


def test_codes_are_a_larger_part_of_what_is_read(servers: Servers) -> None:
    """The same tokens are half of the bytes in 8 bits, and an index of as many bytes weighs twice as much."""
    prompt = prompt_of(500, 3, SHAPE.vocab_size)
    policy: Any = {"decode": {"policy": "lowbit_top_k", "budget": 100}}
    narrow, wide = (
        ask(address, prompt, policy)["meta_info"]["attention"]["decode"] for address in (servers.narrow, servers.wide)
    )
    assert narrow["kv_read_ratio"] > wide["kv_read_ratio"]


def test_no_log_of_a_server_has_an_error(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> None:
    del servers
    for log in Path(tmp_path_factory.getbasetemp()).glob("fp8*/narrow"):
        assert "Traceback" not in log.read_text(errors="replace")
