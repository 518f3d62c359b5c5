"""Models with soft caps (Gemma 2's shape) and sink logits (gpt-oss's), over servers on the CPU.

Every other layer has a sliding window. Policies act on the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from sglang_winnow import audit_share, crossover
from tests.models import ModelShape, write_model, write_weights
from tests.policy_rows import ROWS, small_policies
from tests.runtime import runtime_server
from tests.sglang_ext.answers import prompt_of
from tests.sglang_ext.reference import Reference
from tests.sglang_ext.test_sliding_windows import Server

pytestmark = pytest.mark.timeout(600)

SINKS = ModelShape(family="gpt_oss", layers=4, kv_heads=2, sliding_window=64)
# A cap that scores of random weights reach.
CAPS = ModelShape(family="gemma2", layers=4, kv_heads=2, sliding_window=64, logit_cap=2.0)
SLIDING, FULL = [0, 2], 1
CHUNK, PROMPT = 128, 500
LOGIT_TOLERANCE = 1e-3
POLICIES: dict[str, Any] = {name: policy for name, policy in small_policies().items() if name != "dense"} | {
    "delta": {"decode": {"policy": "delta", "budget": 64, "recency": 32, "delta_layers": [FULL], "full_layers": 1}},
    # Capped scores are so alike that heads together need most tokens for a larger share.
    "tactic": {"decode": {"policy": "tactic", "p": 0.2, "full_layers": 1}},
}


@pytest.fixture(scope="module", params=[SINKS, pytest.param(CAPS, marks=pytest.mark.full)], ids=lambda it: it.family)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param.family)
    model = write_model(folder / "model", request.param)
    write_weights(model)
    arguments = ["--attention-backend", "winnow", "--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "4096"]
    arguments += ["--speculative-algorithm", "WINNOW"]
    environment = {crossover.ENVIRONMENT: "0", "SGLANG_DEBUG_MEMORY_POOL": "1"}
    # On CUDA a server audits only if it is asked to.
    environment[audit_share.ENVIRONMENT] = "0"
    with runtime_server(model, *arguments, log=folder / "log", **environment) as runtime:
        yield Server(runtime.url, Reference(model, "eager"))


def prompt(seed: int, length: int = PROMPT) -> list[int]:
    return prompt_of(length, seed, SINKS.vocab_size)


@pytest.mark.parametrize("length", [1, 65, CHUNK + 1, PROMPT])
def test_dense_answers_are_those_of_transformers(server: Server, length: int) -> None:
    text = prompt(length, length)
    for answer in (server.answer(text, {}), server.answer(text, {})):
        assert max(server.reference.logit_gaps(text, answer["output_ids"])) < LOGIT_TOLERANCE
        assert answer["meta_info"]["attention"]["decode"]["attended_ratio"] == 1


def test_answers_would_be_others_without_caps_and_sinks(server: Server) -> None:
    blind = deepcopy(server.reference)
    for module in blind.model.modules():
        if hasattr(module, "sinks"):
            module.sinks.data.fill_(-1e4)
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None
    text = prompt(PROMPT)
    assert max(blind.logit_gaps(text, server.answer(text, {})["output_ids"])) > 10 * LOGIT_TOLERANCE


def test_policies_act_on_the_layers_with_full_attention(server: Server) -> None:
    assert server.information()["winnow"]["sliding_layers"] == SLIDING
    for name, policy in POLICIES.items():
        cost = server.cost(prompt(2), policy)
        assert (cost["decode"]["policy"], cost["decode"]["dense_steps"], cost["sliding_layers"]) == (name, 0, 2)
        assert cost["decode"]["attended_ratio"] < 1, name


# Each attends in a way of its own, and in the end to all that there is.
@pytest.mark.parametrize(
    "policy",
    [
        {"early_termination": {"scale": 0.0001, "direction": 0.0001, "patience": 1000}},
        {"prefill": {"policy": "quoka", "budget": 4096, "block": 64}},
        {"decode": {"policy": "lowbit_top_p", "p": 0.9999}},
    ],
    ids=["early termination", "quoka", "lowbit_top_p"],
)
def test_what_holds_all_of_the_attention_answers_as_dense_attention(server: Server, policy: Any) -> None:
    text = prompt(3, 300)
    answer = server.answer(text, policy)
    assert max(server.reference.logit_gaps(text, answer["output_ids"])) < LOGIT_TOLERANCE


@pytest.mark.parametrize("name", ["streaming_llm", "lowbit_top_k", "verified_pages"])
def test_verified_answers_are_dense_ones(server: Server, name: str) -> None:
    text = prompt(5)
    sparse = {"decode": {"policy": name, **ROWS[name].small}, "verify": {"draft_tokens": 3}}
    answer = server.answer(text, sparse)
    assert answer["output_ids"] == server.answer(text, {})["output_ids"]
    assert answer["meta_info"]["attention"]["verify"]["drafted"] > 0


def test_reported_shares_are_true_and_audited_outputs_near_those_of_dense_attention(server: Server) -> None:
    asked = {"decode": {"policy": "lowbit_top_p", "p": 0.95}, "audit": 1.0}
    cost = server.cost(prompt(4), asked)
    assert cost["decode"]["estimated_share"] == pytest.approx(cost["audit"]["true_share"], abs=0.03)
    assert 0.93 < cost["audit"]["true_share"] <= 1
    assert cost["audit"]["output_error"] < 0.2


def test_next_tokens_are_compared_with_those_of_the_same_attention(server: Server) -> None:
    """With caps, sinks and windows: without them a step that attends to all would lose something, too."""
    policies: list[Any] = [
        {"decode": {"policy": "lowbit_top_p", "p": 0.3}},
        {"early_termination": {"scale": 0.0001, "direction": 0.0001, "patience": 1000}},
    ]
    lost, nothing = (
        server.cost(prompt(4), policy | {"audit": {"share": 1.0, "kl": True}})["audit"] for policy in policies
    )
    assert lost["steps"] == nothing["steps"] > 0
    assert nothing["next_token_kl"] < min(1e-6, lost["next_token_kl"] / 100)
