"""Audits of the next token: KL and top-1 are those of transformers' distributions, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import httpx
import pytest
import torch
from torch import Tensor

from sglang_winnow.answer import answer
from tests.models import ModelShape, write_model, write_weights
from tests.runtime import runtime_server
from tests.sglang_ext.answers import prompt_of
from tests.sglang_ext.conftest import ENVIRONMENT
from tests.sglang_ext.reference import Reference
from tests.sglang_ext.test_device_server import interpreted
from winnow_kernels.decode.audit import next_token_divergence
from winnow_kernels.decode.statistics import Field
from winnow_kernels.policies.attention_policy import parse_policy

# Of one layer keys and values depend on no attention: the cache is dense attention's, whatever read it.
SHAPE: Final = ModelShape(layers=1, kv_heads=2)
CHUNK: Final = 64
STEPS: Final = 12
KL: Final = {"share": 1.0, "kl": True}
SPARSE: Final[dict[str, Any]] = {
    "streaming_llm": {"decode": {"policy": "streaming_llm", "window": 16, "sinks": 1}},
    "quest": {"decode": {"policy": "quest", "budget": 32, "full_layers": 0}},
    "lowbit_top_p": {"decode": {"policy": "lowbit_top_p", "p": 0.5}},
    "early termination": {
        "decode": {"policy": "lowbit_top_k", "budget": 96},
        "early_termination": {"scale": 0.5, "direction": 0.5, "patience": 1},
    },
}


@dataclass
class Server:
    http: httpx.Client
    reference: Reference

    def ask(
        self, prompt: list[int], policy: Any, tokens: int = STEPS + 1, *, logprobs: bool = True, **sampling: Any
    ) -> Any:
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": tokens,
                "ignore_eos": True,
                "custom_params": {"attention": json.dumps(policy)},
                **sampling,
            },
        }
        if logprobs:
            body |= {"return_logprob": True, "token_ids_logprob": list(range(SHAPE.vocab_size))}
        response = self.http.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def expected(self, prompt: list[int], told: Any) -> tuple[float, float]:
        """Return the mean KL of an answer's decode steps to transformers' distributions, and the share of equal top-1.

        Args:
            prompt: of the answer.
            told: the answer, with log-probabilities of the whole vocabulary.
        """
        sparse, dense = self.distributions(prompt, told)
        same = dense.argmax(-1) == sparse.argmax(-1)
        return float((dense.exp() * (dense - sparse)).sum(-1).mean()), float(same.double().mean())

    def distributions(self, prompt: list[int], told: Any) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of an answer's decode steps, and transformers', float64 [steps, vocabulary]."""
        dense = self.reference._logits(prompt, told["output_ids"])[1:].double().log_softmax(-1)
        told_steps = told["meta_info"]["output_token_ids_logprobs"][1:]
        assert all([token for _, token, _ in step] == list(range(SHAPE.vocab_size)) for step in told_steps)
        sparse = torch.tensor([[logprob for logprob, _, _ in step] for step in told_steps], dtype=torch.float64)
        return sparse, dense


@pytest.fixture(scope="module", params=["torch", pytest.param("kernels", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """On the torch path, and with the kernels of a GPU, which Triton interprets where there is none."""
    folder = tmp_path_factory.mktemp("next_tokens")
    model = write_model(folder / "model", SHAPE)
    write_weights(model)
    arguments = ["--attention-backend", "winnow", "--max-total-tokens", "8192", "--chunked-prefill-size", str(CHUNK)]
    arguments += ["--disable-radix-cache"]
    kernels = {}
    if request.param == "torch":
        arguments += ["--enable-mixed-chunk"]
    elif not torch.cuda.is_available():
        kernels = interpreted()
    with (
        runtime_server(model, *arguments, log=folder / "log", **ENVIRONMENT, **kernels) as runtime,
        httpx.Client(base_url=runtime.url, timeout=900) as http,
    ):
        yield Server(http, Reference(model))


def prompt(seed: int, length: int = 300) -> list[int]:
    return prompt_of(length, seed, SHAPE.vocab_size)


def audit_of(told: Any) -> Any:
    return told["meta_info"]["attention"]["audit"]


def assert_as_expected(server: Server, text: list[int], told: Any) -> float:
    divergence, same = server.expected(text, told)
    audit = audit_of(told)
    assert audit["steps"] == len(told["output_ids"]) - 1
    assert audit["next_token_kl"] == pytest.approx(divergence, rel=1e-3, abs=1e-6)
    assert audit["top1"] == pytest.approx(same, abs=1e-6)
    return divergence


@pytest.mark.parametrize("name", SPARSE)
def test_it_is_that_of_transformers(server: Server, name: str) -> None:
    divergences = [
        assert_as_expected(server, text, server.ask(text, SPARSE[name] | {"audit": KL}))
        for text in (prompt(1), prompt(2, 400))
    ]
    assert min(divergences) > 1e-4


@pytest.mark.parametrize("name", SPARSE)
def test_nothing_else_changes(server: Server, name: str) -> None:
    text = prompt(3)
    plain = server.ask(text, SPARSE[name] | {"audit": 1.0})
    compared = server.ask(text, SPARSE[name] | {"audit": KL})
    assert compared["output_ids"] == plain["output_ids"]
    for field in ("output_token_logprobs", "output_token_ids_logprobs"):
        assert compared["meta_info"][field] == plain["meta_info"][field]
    audit = audit_of(compared)
    assert (audit_of(plain)["next_token_kl"], audit_of(plain)["top1"]) == (None, None)
    assert audit["next_token_kl"] > 0
    audit["next_token_kl"] = audit["top1"] = None
    assert compared["meta_info"]["attention"] == plain["meta_info"]["attention"]


def test_a_step_that_attends_to_all_loses_nothing(server: Server) -> None:
    never_stopped = {"early_termination": {"scale": 0.0001, "direction": 0.0001, "patience": 1000}}
    audit = audit_of(server.ask(prompt(4), never_stopped | {"audit": KL}))
    assert (audit["steps"], audit["top1"]) == (STEPS, 1)
    assert audit["next_token_kl"] < 1e-9
    # A budget that holds the context makes steps dense: there is nothing to audit.
    covered = {"decode": {"policy": "quest", "budget": 2048, "full_layers": 0}}
    audit = audit_of(server.ask(prompt(4), covered | {"audit": KL}))
    assert (audit["steps"], audit["next_token_kl"], audit["top1"]) == (0, None, None)


def test_rows_of_a_batch_are_compared_each_by_itself(server: Server) -> None:
    """Alone first. Then together, some in passes in which others are prefilled, which SGLang mixes without logprobs."""
    asked: list[Any] = [
        SPARSE["quest"] | {"audit": KL},
        {},
        SPARSE["streaming_llm"] | {"audit": 1.0},
        SPARSE["streaming_llm"] | {"audit": KL},
        SPARSE["quest"],
        SPARSE["lowbit_top_p"] | {"audit": KL},
    ]
    texts = [prompt(10 + row, 200 + 90 * row) for row in range(len(asked))]
    alone = [server.ask(text, policy, 40) for text, policy in zip(texts, asked, strict=True)]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = pool.map(lambda text, policy: server.ask(text, policy, 40, logprobs=False), texts, asked)
    for text, policy, one, other in zip(texts, asked, alone, together, strict=True):
        assert other["output_ids"] == one["output_ids"]
        if policy.get("audit") == KL:
            assert assert_as_expected(server, text, one) > 1e-4
            for figure in ("steps", "next_token_kl", "top1"):
                assert audit_of(other)[figure] == pytest.approx(audit_of(one)[figure], rel=1e-3)
        elif "audit" in policy:
            assert audit_of(other)["next_token_kl"] is None


def test_it_is_of_the_logits_before_sampling(server: Server) -> None:
    """A bias that decides all tokens, and a temperature: what they do to log-probabilities is undone here."""
    text, bias, temperature = prompt(5), 20.0, 0.7
    policy = SPARSE["streaming_llm"] | {"audit": KL}
    told = server.ask(text, policy, temperature=temperature, logit_bias={"7": bias})
    assert told["output_ids"] == [7] * (STEPS + 1)
    sampled, dense = server.distributions(text, told)
    sparse = sampled * temperature
    sparse[:, 7] -= bias
    divergence, same = next_token_divergence(dense, sparse)
    assert audit_of(told)["next_token_kl"] == pytest.approx(float(divergence.mean()), rel=1e-3)
    assert audit_of(told)["top1"] == pytest.approx(float(same.double().mean()), abs=1e-6)


def test_a_divergence_is_that_of_its_definition() -> None:
    dense, sparse = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)) * 3
    sparse[1] = dense[1] + 5
    dense[2, 0], sparse[2, :2] = -torch.inf, torch.tensor([-torch.inf, 1.0])
    divergence, same = next_token_divergence(dense, sparse)
    for row in range(3):
        p, q = (logits[row].double().exp() / logits[row].double().exp().sum() for logits in (dense, sparse))
        expected = sum(float(a * (a / b).log()) for a, b in zip(p, q, strict=True) if a > 0)
        assert float(divergence[row]) == pytest.approx(expected, abs=1e-12)
        assert bool(same[row]) == (int(p.argmax()) == int(q.argmax()))
    assert float(divergence[1]) < 1e-12
    assert float(divergence.min()) >= 0


def test_the_answer_tells_means_over_compared_steps() -> None:
    row = torch.zeros(len(Field), dtype=torch.float64)
    row[Field.AUDITED_NEXT_TOKENS], row[Field.AUDITED_KL], row[Field.AUDITED_TOP1] = 4, 0.5, 3
    policy = parse_policy(SPARSE["quest"] | {"audit": KL})
    told = answer(row, policy, 0, 0, 0, 0, 0, 0, 1.0)["audit"]
    assert (told["next_token_kl"], told["top1"]) == (0.125, 0.75)
