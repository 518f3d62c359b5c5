"""Whether a server on CUDA answers as one on the CPU does, whose attention is the references': each policy, and drafts.

    python -m benchmarks.serving.cuda_answers windows --output cuda-answers-windows.json

Models are small and have random weights, in float32 but for gpt-oss's shape, whose experts SGLang computes in 16 bits
alone on CUDA. Each policy is asked alone, then all are in one batch. Where both servers' tokens part, the
log-probabilities of the CPU's two likeliest tokens tell whether it was a tie. A third server, on CUDA, verifies drafts:
its answers, and dense ones beside them, are compared with dense ones of its own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from rich.console import Console
from rich.markdown import Markdown

from benchmarks.folders import RESULTS
from benchmarks.records import header_from_outside
from benchmarks.serving.server_plugins import NATIVE_LAYERS, python_path
from benchmarks.serving.tables import cuda_answers_table
from sglang_winnow.backend_name import NAME
from sglang_winnow.crossover import ENVIRONMENT
from sglang_winnow.dense_backend import DENSE_ENVIRONMENT
from tests.models import ModelShape, write_model, write_weights
from tests.policy_rows import ROWS
from tests.runtime import runtime_server
from tests.sglang_ext.answers import LOGPROBS, Step, prompt_of, steps
from tests.sglang_ext.test_device_server import (
    ALTERNATING_POLICIES,
    CAPPED,
    POLICIES,
    SHAPE,
    WINDOWED,
    WINDOWED_POLICIES,
    WITH_SINKS,
)
from winnow_evaluation.writing import write_json
from winnow_kernels.contract.verification import ALGORITHM

Policy = Mapping[str, Any]
Ask = Callable[[httpx.Client], list["Answer"]]

TAKES_FLOAT32: Final = "triton"
"""The dense backend of SGLang that does."""
TOKENS: Final = 16
VERIFIED_TOKENS: Final = 24
BESIDE: Final = "dense, beside drafts"
_NARROW: Final = ("--kv-cache-dtype", "fp8_e4m3")
_ARGUMENTS: Final = (
    *("--attention-backend", NAME, "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--chunked-prefill-size", "512", "--max-total-tokens", "65536", "--max-running-requests", "32"),
)
_ON_CUDA: Final = (
    *("--mem-fraction-static", "0.3", "--cuda-graph-bs-decode", "1", "4", "16", "32"),
    *("--cuda-graph-bs-prefill", "512"),
)

console = Console(width=150)


@dataclass(frozen=True)
class Model:
    """What is served, with which policies and options."""

    shape: ModelShape
    policies: Mapping[str, Policy]
    options: Sequence[str] = ()


# All experts compute: in 16 bits rounding would choose among those that score alike.
_WITH_SINKS: Final = replace(WITH_SINKS, chosen_experts=4, dtype="bfloat16")
MODELS: Final = {
    "full": Model(SHAPE, POLICIES),
    "windows": Model(WINDOWED, WINDOWED_POLICIES),
    "8-bit": Model(SHAPE, POLICIES, _NARROW),
    "caps": Model(CAPPED, ALTERNATING_POLICIES),
    "caps-8-bit": Model(CAPPED, ALTERNATING_POLICIES, _NARROW),
    "sinks": Model(_WITH_SINKS, ALTERNATING_POLICIES),
    "sinks-8-bit": Model(_WITH_SINKS, ALTERNATING_POLICIES, _NARROW),
}
DRAFTS: Final[Mapping[str, Policy]] = {
    "quest": {"policy": "quest", "budget": 64, "full_layers": 0},
    "lowbit_top_k": {"policy": "lowbit_top_k", "budget": 64},
    "streaming_llm": {"policy": "streaming_llm", "window": 48},
    "verified_pages": {"policy": "verified_pages", **ROWS["verified_pages"].small},
    "lowbit_top_p": {"policy": "lowbit_top_p", "p": 0.5},
    "tactic": {"policy": "tactic", "p": 0.7, "full_layers": 0},
}


@dataclass(frozen=True)
class Answer:
    """An answer to one request.

    Attributes:
        request: what was asked.
        steps: the tokens, with log-probabilities.
        cost: what it says of its attention.
    """

    request: str
    steps: Sequence[Step]
    cost: Policy


@dataclass(frozen=True)
class Compared:
    """An answer beside the one that is expected.

    Attributes:
        request: what was asked.
        parted_at: the first token that differs; None if all are alike.
        gap: there, by how much the expected token's log-probability is above the next one's.
        logprob_difference: of the tokens before, at most.
        attended: share of the context that decode attended, in per cent; own and expected.
        verify: what the answer says of its drafts.
    """

    request: str
    parted_at: int | None
    gap: float | None
    logprob_difference: float
    attended: tuple[float | None, float | None]
    verify: Policy | None


def compare(answer: Answer, expected: Answer) -> Compared:
    """Return how far ``answer`` is from the ``expected`` one; of tokens alone if it has no log-probabilities."""
    pairs = list(zip(answer.steps, expected.steps, strict=True))
    parted = next((place for place, (own, wanted) in enumerate(pairs) if own.token != wanted.token), None)
    return Compared(
        answer.request,
        parted,
        None if parted is None else expected.steps[parted].gap,
        max((abs(own.logprob - wanted.logprob) for own, wanted in pairs[:parted]), default=0.0),
        (_attended(answer.cost), _attended(expected.cost)),
        answer.cost.get("verify"),
    )


def main(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}.")],
    dense_backend: Annotated[str, typer.Option(help="SGLang's, on CUDA.")] = TAKES_FLOAT32,
    bfloat16: Annotated[bool, typer.Option("--bfloat16", help="In place of float32, in all servers.")] = False,
    output: Annotated[Path | None, typer.Option(help="Where to write JSON.")] = None,
) -> None:
    """Ask, print a table, write JSON."""
    if model not in MODELS:
        raise typer.BadParameter(f"must be one of {', '.join(MODELS)}", param_hint="model")
    served = MODELS[model]
    shape = replace(served.shape, dtype="bfloat16") if bfloat16 else served.shape
    if shape.dtype == "float32" and dense_backend != TAKES_FLOAT32:
        message = f"only {TAKES_FLOAT32} takes float32: ask for --bfloat16"
        raise typer.BadParameter(message, param_hint="--dense-backend")
    about = header_from_outside() | {"model": model, "dense_backend": dense_backend, "dtype": shape.dtype}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(3) as pool:
        folder = Path(name)
        weights = write_model(folder / "model", shape)
        write_weights(weights)
        on_cuda = {DENSE_ENVIRONMENT: dense_backend}
        if shape.dtype == "float32":
            on_cuda["PYTHONPATH"] = python_path(NATIVE_LAYERS)

        def answers(ask: Ask, log: str, *arguments: str, **environment: str) -> list[Answer]:
            options = (*_ARGUMENTS, "--dtype", shape.dtype, *served.options, *arguments)
            environment[ENVIRONMENT] = "0"
            with (
                runtime_server(weights, *options, log=folder / log, **environment) as runtime,
                httpx.Client(base_url=runtime.url, timeout=300) as http,
            ):
                return ask(http)

        # A first start compiles for minutes: all three do it side by side.
        ask = partial(ask_policies, policies=served.policies)
        verifying = (*_ON_CUDA, "--speculative-algorithm", ALGORITHM)
        expected = pool.submit(answers, ask, "cpu", CUDA_VISIBLE_DEVICES="")
        got = pool.submit(answers, ask, "cuda", *_ON_CUDA, **on_cuda)
        checked = pool.submit(answers, ask_verified, "verifying", *verifying, **on_cuda)
        rows = [compare(own, wanted) for own, wanted in zip(got.result(), expected.result(), strict=True)]
        dense = {answer.request: answer for answer in checked.result()}
        verified = [
            compare(answer, dense[answer.request.rpartition(", ")[2]])
            for answer in checked.result()
            if answer.cost.get("verify") or answer.request.startswith(BESIDE)
        ]
    record = {"header": about, "answers": [vars(row) for row in rows], "verified": [vars(row) for row in verified]}
    others = [value for value in (dense_backend, shape.dtype) if value not in (TAKES_FLOAT32, served.shape.dtype)]
    path = output or RESULTS / f"cuda-answers-{'-'.join([model, *others])}.json"
    write_json(path, record)
    console.print(Markdown(cuda_answers_table(path)))


def ask_policies(http: httpx.Client, policies: Mapping[str, Policy]) -> list[Answer]:
    """Return answers to dense requests, to each policy alone, and to all in one batch behind other prompts."""
    alone = [_ask(http, f"dense {length}", {}, length, TOKENS) for length in (900, 957, 1014, 1071)]
    alone += [_ask(http, name, policy, 1200, TOKENS) for name, policy in policies.items()]
    jobs = [(f"{name}, in a batch", policy, 1100 + 40 * place) for place, (name, policy) in enumerate(policies.items())]
    return alone + _together(http, jobs, TOKENS)


def ask_verified(http: httpx.Client) -> list[Answer]:
    """Return dense answers to three prompts, then verified ones, beside a dense request and beside a sparse one."""
    dense = [_ask(http, f"prompt {number}", {}, 300 + 90 * number, VERIFIED_TOKENS) for number in range(3)]
    jobs: list[tuple[str, Policy, int]] = [
        (
            f"{name}, {drafts} drafts, prompt {number}",
            {"decode": decode, "verify": {"draft_tokens": drafts}},
            300 + 90 * number,
        )
        for name, decode in DRAFTS.items()
        for drafts, number in ((2, 0), (5, 1), (5, 2))
    ]
    beside: list[tuple[str, Policy, int]] = [(f"{BESIDE}, prompt 1", {}, 390)]
    # Dense rows decode in the passes that check. A sparse one needs passes of its own.
    beside_sparse = [(f"beside sparse, {request}", policy, length) for request, policy, length in jobs[:6]]
    beside_sparse.append(("snapkv, beside, prompt 2", POLICIES["snapkv"], 480))
    return dense + _together(http, jobs + beside, VERIFIED_TOKENS) + _together(http, beside_sparse, VERIFIED_TOKENS)


def _together(http: httpx.Client, jobs: Sequence[tuple[str, Policy, int]], tokens: int) -> list[Answer]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        asked = [pool.submit(_ask, http, request, policy, length, tokens) for request, policy, length in jobs]
        return [each.result() for each in asked]


def _ask(http: httpx.Client, request: str, policy: Policy, length: int, tokens: int) -> Answer:
    parameters = {
        "temperature": 0,
        "max_new_tokens": tokens,
        "ignore_eos": True,
        "custom_params": {"attention": json.dumps(policy)},
    }
    body = {"input_ids": prompt_of(length, length, SHAPE.vocab_size), "sampling_params": parameters} | LOGPROBS
    answer = http.post("/generate", json=body).raise_for_status().json()
    return Answer(request, steps(answer), answer["meta_info"]["attention"])


def _attended(cost: Policy) -> float | None:
    share: float | None = cost.get("decode", {}).get("attended_ratio")
    return share


if __name__ == "__main__":
    typer.run(main)
