"""A server whose kernels Triton interprets answers and counts as one on the torch path: all but CUDA and its graphs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_winnow import audit_share, crossover
from sglang_winnow.dense_backend import DENSE_ENVIRONMENT, TRITON
from sglang_winnow.sglang_versions.releases import VERIFIES_ON_CUDA
from tests.models import ModelShape, write_model, write_weights
from tests.policy_rows import small_policies
from tests.runtime import runtime_server
from tests.sglang_ext.answers import LOGPROBS, TOLERANCE, TOLERANCE_OF_SELECTIONS, equal_steps, equal_tokens, prompt_of

# Each token of each request is a second or so of interpreted kernels.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

SHAPE = ModelShape(layers=3, query_heads=4, kv_heads=2, context_length=2048)
TOKENS = 3
# A step of decode reads what prefill has written and chosen.
TOKENS_AFTER_PADDED_PASSES = 2
TERMINATION = {"scale": 0.2, "direction": 0.2, "patience": 1}
POLICIES: Mapping[str, Mapping[str, Any]] = small_policies() | {
    "streaming_llm": {"decode": {"policy": "streaming_llm", "window": 64}},
    "quest": {"decode": {"policy": "quest", "budget": 128, "full_layers": 1}},
    "snapkv": {"decode": {"policy": "snapkv", "budget": 96, "observation_window": 16}},
    "pyramidkv": {"decode": {"policy": "pyramidkv", "budget": 128, "observation_window": 32}},
    "delta": {"decode": {"policy": "delta", "budget": 128, "recency": 32, "full_layers": 1, "delta_layers": [1]}},
    "tactic": {"decode": {"policy": "tactic", "p": 0.7, "full_layers": 0}},
    "tactic, terminated": {
        "decode": {"policy": "tactic", "p": 0.9, "full_layers": 1},
        "early_termination": TERMINATION,
    },
    "quoka": {"decode": {"policy": "quoka", "budget": 96}},
    "quoka prefill": {"prefill": {"policy": "quoka", "budget": 128, "block": 64}},
}
# A context is longer than any pass to which prefill is padded.
WINDOWED = ModelShape(family="gemma3_text", layers=6, query_heads=4, kv_heads=2, context_length=4096, sliding_window=64)
# Of six layers the third and the last see the whole context.
WINDOWED_POLICIES: Mapping[str, Mapping[str, Any]] = {
    **POLICIES,
    "quest": {"decode": {"policy": "quest", "budget": 128, "full_layers": 3}},
    "delta": {"decode": {"policy": "delta", "budget": 128, "recency": 32, "full_layers": 1, "delta_layers": [2]}},
}
# Of four layers the second and the last see the whole context. A cap that scores of random weights reach.
CAPPED = ModelShape(
    family="gemma2", layers=4, query_heads=4, kv_heads=2, context_length=4096, sliding_window=64, logit_cap=2.0
)
WITH_SINKS = ModelShape(family="gpt_oss", layers=4, query_heads=4, kv_heads=2, context_length=4096, sliding_window=64)
ALTERNATING_POLICIES: Mapping[str, Mapping[str, Any]] = {
    **POLICIES,
    "quest": {"decode": {"policy": "quest", "budget": 128, "full_layers": 2}},
    # Capped scores are so alike that heads together need most tokens for a larger share.
    "tactic": {"decode": {"policy": "tactic", "p": 0.2, "full_layers": 0}},
}
MODELS = [
    (SHAPE, POLICIES),
    (WINDOWED, WINDOWED_POLICIES),
    (CAPPED, ALTERNATING_POLICIES),
    (WITH_SINKS, ALTERNATING_POLICIES),
]
IDS = ["all full", "windowed", "capped", "with sinks"]
REPLAYED = ("dense", "snapkv", "delta", "quoka prefill")
REPLAYING = Path(__file__).parent / "replayed_prefill"
INTERPRETING = Path(__file__).parent / "interpreted_kernels"


def interpreted(shape: ModelShape = SHAPE, *plugins: Path) -> dict[str, str]:
    """Return the environment of a server that interprets kernels, as tests of kernels do, with more ``plugins``.

    It serves a model of ``shape``. SGLang's dense backend for a CPU knows neither caps nor sinks.
    """
    own = [path] if (path := os.environ.get("PYTHONPATH")) else []
    path = os.pathsep.join([*map(str, (INTERPRETING, *plugins)), *own])
    dense = {DENSE_ENVIRONMENT: TRITON} if shape in (CAPPED, WITH_SINKS) else {}
    return {"TRITON_INTERPRET": "1", "PYTHONPATH": path} | dense


@contextmanager
def serve(model: Path, log: Path, *more: str, **environment: str) -> Iterator[httpx.Client]:
    arguments = ("--chunked-prefill-size", "512", "--max-total-tokens", "16384", "--max-running-requests", "4")
    environment[crossover.ENVIRONMENT] = "0"
    with (
        runtime_server(model, *arguments, *more, log=log, **environment) as runtime,
        httpx.Client(base_url=runtime.url, timeout=900) as http,
    ):
        yield http


def ask(http: httpx.Client, policy: Mapping[str, Any], length: int, tokens: int = TOKENS, **more: Any) -> Any:
    parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    custom = {"custom_params": {"attention": json.dumps(policy)}}
    body = {"input_ids": prompt_of(length, length, SHAPE.vocab_size), "sampling_params": parameters | custom}
    return http.post("/generate", json=body | LOGPROBS | more).raise_for_status().json()


def answers_of_padded_passes(http: httpx.Client, policies: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Each policy alone, then prompts that share passes: dense ones, QUOKA's, and both."""
    names = [name for name in policies if name in REPLAYED]
    numbered = [(names[number % len(names)], 130 + 57 * number) for number in range(2 * len(names))]

    def answer(asked: tuple[str, int]) -> Any:
        name, length = asked
        return ask(http, policies[name], length, TOKENS_AFTER_PADDED_PASSES)

    alone = [answer((name, 700)) for name in names]
    with ThreadPoolExecutor(len(numbered)) as pool:
        return alone + list(pool.map(answer, numbered))


def answers(http: httpx.Client, policies: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Each policy alone behind a prompt of a span and more, then all together behind other prompts."""
    asked = list(policies.values())
    alone = [ask(http, policy, 1200) for policy in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = pool.map(lambda numbered: ask(http, numbered[1], 1100 + 40 * numbered[0]), enumerate(asked))
        return alone + list(together)


def assert_equal_costs(own: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Where scores nearly tie, rounding decides on a token or a sample more: two thousandths of a ratio at most."""
    for name, expected in wanted.items():
        if isinstance(expected, Mapping):
            assert_equal_costs(own[name], expected)
        elif isinstance(expected, float):
            assert own[name] == pytest.approx(expected, rel=2e-3), name
        else:
            assert own[name] == expected, name
    assert own.keys() == wanted.keys()


@pytest.mark.parametrize(("shape", "policies"), MODELS, ids=IDS)
def test_answers_and_costs_are_those_of_the_torch_path(
    shape: ModelShape, policies: Mapping[str, Mapping[str, Any]], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", shape)
    write_weights(model)
    with serve(model, tmp_path / "torch.log") as http:
        expected = answers(http, policies)
    with serve(model, tmp_path / "device.log", **interpreted(shape)) as http:
        got = answers(http, policies)
    for number, (own, wanted) in enumerate(zip(got, expected, strict=True)):
        assert equal_steps(own, wanted, TOLERANCE_OF_SELECTIONS) == TOKENS
        cost, wanted_cost = (answer["meta_info"]["attention"] for answer in (own, wanted))
        if number >= len(POLICIES) or list(POLICIES)[number] == "quoka prefill":
            # Prompts share chunks: how far an index of a prompt is built beforehand depends on who came first. And on
            # the device QUOKA's prefill needs no index.
            del cost["index_built_tokens"], wanted_cost["index_built_tokens"]
        assert_equal_costs(cost, wanted_cost)


@pytest.mark.parametrize(("shape", "policies"), MODELS, ids=IDS)
def test_audited_answers_are_the_same_and_audits_those_of_the_torch_path(
    shape: ModelShape, policies: Mapping[str, Mapping[str, Any]], tmp_path: Path
) -> None:
    """By the share of the request, which compares next tokens, or else of the server; alone, and then together."""
    model = write_model(tmp_path / "model", shape)
    write_weights(model)
    tokens, server_share = 4, 0.5
    compared = {"share": 1.0, "kl": True}
    named = ("quest", "delta", "streaming_llm", "lowbit_top_p")
    asked = [{**policies[name], **audit} for name in named for audit in ({}, {"audit": compared}, {"audit": 0.0})]

    def all_answers(http: httpx.Client) -> list[Any]:
        def answer(number: int, *, alone: bool) -> Any:
            # Which steps are audited follows from the request's name.
            return ask(http, asked[number], 700 + number // 3, tokens, rid=f"request {number} {alone}")

        numbers = range(len(asked))
        alone = [answer(number, alone=True) for number in numbers]
        with ThreadPoolExecutor(4) as pool:
            return alone + list(pool.map(lambda number: answer(number, alone=False), numbers))

    environment = {audit_share.ENVIRONMENT: str(server_share)}
    with serve(model, tmp_path / "torch.log", **environment) as http:
        expected = all_answers(http)
    with serve(model, tmp_path / "device.log", **environment, **interpreted(shape)) as http:
        got = all_answers(http)
    for number, (own, wanted) in enumerate(zip(got, expected, strict=True)):
        assert equal_steps(own, wanted, TOLERANCE_OF_SELECTIONS) == tokens
        cost, wanted_cost = (answer["meta_info"]["attention"] for answer in (own, wanted))
        audit = cost["audit"]
        if asked[number % len(asked)].get("audit") == 0:
            assert audit is None
            assert wanted_cost["audit"] is None
            continue
        assert_equal_costs(audit, wanted_cost["audit"])
        assert audit["output_error"] > 0.01
        assert (audit["next_token_kl"] is not None) == (asked[number % len(asked)].get("audit") == compared)
    of_whole_steps = [answer["meta_info"]["attention"]["audit"]["steps"] for answer in got[1::3]]
    assert set(of_whole_steps) == {tokens - 1}
    for first in range(0, len(asked), 3):
        plain = got[first + 2]
        for audited in got[first : first + 2]:
            assert audited["output_ids"] == plain["output_ids"]
            # The plain prompt is cached: what is left is a smaller batch, for experts and for Triton's dense kernel.
            own, wanted = (
                [step[0] for step in each["meta_info"]["output_token_logprobs"]] for each in (audited, plain)
            )
            assert own == (pytest.approx(wanted, abs=1e-5) if shape in (CAPPED, WITH_SINKS) else wanted)
            assert audited["meta_info"]["attention"]["decode"] == plain["meta_info"]["attention"]["decode"]


@pytest.mark.parametrize(("shape", "policies"), MODELS, ids=IDS)
def test_explanations_are_those_of_the_torch_path(
    shape: ModelShape, policies: Mapping[str, Mapping[str, Any]], tmp_path: Path
) -> None:
    """Of steps of several requests in a batch, one of which is dense."""
    model = write_model(tmp_path / "model", shape)
    write_weights(model)
    every = {WINDOWED: 3, CAPPED: 2, WITH_SINKS: 2}.get(shape, 1)
    full = list(range(every - 1, shape.layers, every))
    asked = {"steps": [2], "layers": full, "heads": list(range(shape.kv_heads))}

    def answer(http: httpx.Client, name: str, length: int) -> Any:
        custom = {"attention": json.dumps(policies[name]), "attention_explain": json.dumps(asked)}
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, "custom_params": custom}
        body = {"input_ids": prompt_of(length, length, shape.vocab_size), "sampling_params": sampling}
        return http.post("/generate", json=body).raise_for_status().json()["meta_info"]["attention"]["explain"]

    def all_answers(http: httpx.Client) -> list[Any]:
        names = ("dense", "quest", "delta", "streaming_llm")
        with ThreadPoolExecutor(len(names)) as pool:
            return list(pool.map(lambda name: answer(http, name, 700 + len(name)), names))

    with serve(model, tmp_path / "torch.log") as http:
        expected = all_answers(http)
    with serve(model, tmp_path / "device.log", **interpreted(shape)) as http:
        got = all_answers(http)
    for number, (own, wanted) in enumerate(zip(got, expected, strict=True)):
        assert len(own["entries"]) == len(full) * shape.kv_heads
        assert own["missing_steps"] == []
        for entry, wanted_entry in zip(own["entries"], wanted["entries"], strict=True):
            assert entry.pop("weights") == pytest.approx(wanted_entry.pop("weights"), abs=1e-5)
            assert entry.pop("share") == pytest.approx(wanted_entry.pop("share"), abs=1e-4)
            assert entry == wanted_entry
            assert entry["dense"] == (number == 0)


@pytest.mark.parametrize(("shape", "policies"), MODELS, ids=IDS)
def test_prefill_in_padded_passes_is_prefill(
    shape: ModelShape, policies: Mapping[str, Mapping[str, Any]], tmp_path: Path
) -> None:
    """As CUDA graphs replay them, with SGLang's own runner (``replayed_prefill``)."""
    model = write_model(tmp_path / "model", shape)
    write_weights(model)
    log = tmp_path / "replayed.log"
    with serve(model, tmp_path / "eager.log", **interpreted(shape)) as http:
        expected = answers_of_padded_passes(http, policies)
    with serve(model, log, **interpreted(shape, REPLAYING)) as http:
        got = answers_of_padded_passes(http, policies)
    # Each prompt alone is two chunks; those together may share passes.
    assert log.read_text().count("A prefill pass is padded as graphs are") > 2 * len(REPLAYED)
    for own, wanted in zip(got, expected, strict=True):
        assert equal_steps(own, wanted, TOLERANCE_OF_SELECTIONS) == TOKENS_AFTER_PADDED_PASSES
        cost, wanted_cost = (answer["meta_info"]["attention"] for answer in (own, wanted))
        del cost["index_built_tokens"], wanted_cost["index_built_tokens"]
        assert_equal_costs(cost, wanted_cost)


@pytest.mark.skipif(not VERIFIES_ON_CUDA, reason="verification is served on CUDA with the oldest release only")
@pytest.mark.parametrize("shape", [shape for shape, _ in MODELS], ids=IDS)
def test_verified_answers_are_those_of_dense_attention(shape: ModelShape, tmp_path: Path) -> None:
    """Of drafts that stand and of drafts that fall, across ends of pages, alone and beside who is not verified."""
    model = write_model(tmp_path / "model", shape)
    write_weights(model)
    tokens = 20
    decodes: list[Mapping[str, Any]] = [
        {"policy": "quest", "budget": 64, "full_layers": 0},
        {"policy": "lowbit_top_k", "budget": 64},
        {"policy": "streaming_llm", "window": 48},
    ]
    asked = [{"decode": decode, "verify": {"draft_tokens": drafts}} for decode in decodes for drafts in (2, 5)]

    def answer(http: httpx.Client, number: int, policy: Mapping[str, Any], **more: Any) -> Any:
        parameters: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        parameters["custom_params"] = {"attention": json.dumps(policy)}
        prompt = prompt_of(300 + 9 * number, number, SHAPE.vocab_size)
        return (
            http.post("/generate", json={"input_ids": prompt, "sampling_params": parameters} | more)
            .raise_for_status()
            .json()
        )

    verifying = ("--speculative-algorithm", "WINNOW")
    with serve(model, tmp_path / "log", *verifying, **interpreted(shape)) as http, ThreadPoolExecutor(4) as pool:
        dense = [answer(http, number, {}, **LOGPROBS) for number in range(2)]
        # Without log-probabilities dense rows decode in the passes that check the others.
        jobs: list[tuple[int, Mapping[str, Any]]] = [
            (number, policy) for policy in [{}, *asked[:3], {}, *asked[3:]] for number in range(2)
        ]
        found = list(pool.map(lambda job: answer(http, *job), jobs))
    for (number, policy), own in zip(jobs, found, strict=True):
        assert equal_tokens(own, dense[number], TOLERANCE) == tokens, policy
    told = [own["meta_info"]["attention"]["verify"] for (_, policy), own in zip(jobs, found, strict=True) if policy]
    assert 0 < sum(each["accepted"] for each in told) < sum(each["drafted"] for each in told)


@pytest.mark.skipif(not VERIFIES_ON_CUDA, reason="verification is served on CUDA with the oldest release only")
def test_grammars_end_answers_of_a_server_that_verifies(tmp_path: Path) -> None:
    """With overlap, who has ended is in one more pass, and has no request slot there."""
    model = write_model(tmp_path / "model", SHAPE)
    write_weights(model)
    verified = {"decode": {"policy": "streaming_llm", "window": 48}, "verify": {"draft_tokens": 2}}

    def answer(http: httpx.Client, policy: Mapping[str, Any], digits: int) -> Any:
        parameters = {"temperature": 0, "max_new_tokens": 24, "regex": f"[0-9]{{{digits}}}"}
        custom = {"custom_params": {"attention": json.dumps(policy)}}
        body = {"input_ids": prompt_of(80, digits, SHAPE.vocab_size), "sampling_params": parameters | custom}
        return http.post("/generate", json=body).raise_for_status().json()["text"]

    arguments = ("--speculative-algorithm", "WINNOW", "--grammar-backend", "llguidance")
    with serve(model, tmp_path / "log", *arguments, **interpreted()) as http, ThreadPoolExecutor(4) as pool:
        dense = {digits: answer(http, {}, digits) for digits in (2, 9)}
        jobs = [(policy, digits) for digits in dense for policy in ({}, verified)]
        found = list(pool.map(lambda job: answer(http, *job), jobs))
    assert [len(dense[digits]) for digits in (2, 9)] == [2, 9]
    assert found == [dense[digits] for _, digits in jobs]
