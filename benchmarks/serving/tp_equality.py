"""Whether two GPUs answer as one does, and how fast: SGLang with tensor parallelism 1 and 2, every decode policy.

    WINNOW_DENSE_BACKEND=fa3 python -m benchmarks.serving.tp_equality --output tp.json

All servers start at once and share the GPUs, but are asked one after another. All policies are asked the same prompts
twice: first for tokens and costs, while kernels compile; then for TPOT. Only the first policy computes whole prompts.

Two GPUs add up in another order what one adds up, so that in bfloat16 two tokens that are about equally likely can
change places, and everything behind them differs; less often in ``--dtype float16``. With the needle model, whose
answers are certain, the first tokens must not; random weights are certain of nothing. Rows say for how many tokens all
answers agree, and by how much the ratios in their ``attention`` differ at most; numbers in it that are no ratios must
be equal.

With ``--draft-tokens`` all but dense answers are verified. How many drafts stand depends on tokens, so that numbers are
not compared. ``SGLANG_SIMULATE_ACC_LEN`` lets drafts stand with random weights.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from rich.console import Console

from benchmarks.command_line import numbers
from benchmarks.folders import REPOSITORY, RESULTS
from benchmarks.model_shapes import SHAPES, shape_named, write_model
from benchmarks.records import Record, Row, header_from_outside
from benchmarks.serving.batch_timing import BatchServer, timing_of
from benchmarks.serving.serve import ROOM_FOR_CHUNKED, Prompts
from sglang_winnow import crossover
from tests.runtime import runtime_server
from winnow_kernels.contract.verification import ALGORITHM
from winnow_kernels.policies.registry import PARAMETERS, POLICIES_SETTING

BENCH: Final = "tensor parallelism"
NEEDLE: Final = "needle"
DENSE: Final = "dense"
TOKENS: Final = 64
_CHOSEN: Final = {"budget": 1024, "window": 1024, "p": 0.75}
"""How much a policy reads, by the field that says so."""
POLICIES: Final[Mapping[str, Mapping[str, Any]]] = {
    **{
        name: {"decode": {"policy": name, **{field: _CHOSEN[field] for field in kind.model_fields if field in _CHOSEN}}}
        for name, kind in PARAMETERS["decode"].items()
    },
    "tactic, capped": {"decode": {"policy": "tactic", "p": 0.75, "max_tokens": 1024}},
}

console = Console(width=150)


@dataclass(frozen=True)
class Answers:
    """What a server said to all prompts with one policy; ``tpot`` in seconds."""

    tokens: Sequence[Sequence[int]]
    costs: Sequence[Mapping[str, Any]]
    tpot: float


def main(
    models: Annotated[
        str, typer.Option(help="needle, and names in benchmarks/model_shapes.py.")
    ] = "needle,Llama-3.1-8B",
    sizes: Annotated[str, typer.Option(help="GPUs of the servers, the first to compare with.")] = "1,2",
    context: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 8192,
    batch: Annotated[int, typer.Option(help="Requests at once.")] = 4,
    draft_tokens: Annotated[int, typer.Option(min=0, help="Drafted for each check; 0 verifies nothing.")] = 0,
    tokens: Annotated[int, typer.Option(help="Of an answer.")] = TOKENS,
    dtype: Annotated[str, typer.Option(help="Of weights and KV cache; each model's own if empty.")] = "",
    policies: Annotated[str, typer.Option(help="Names in this file, with semicolons between; all if empty.")] = "",
    log_folder: Annotated[Path | None, typer.Option(help="Where the servers' logs are left.")] = None,
    output: Annotated[Path, typer.Option(help="Where to write JSON.")] = RESULTS / "tp.json",
) -> None:
    """Compare, print, write JSON after each model."""
    # Policies act at every length.
    os.environ[crossover.ENVIRONMENT] = "0"
    asked = asked_with(draft_tokens)
    names = policies.split(";") if policies else list(asked)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        about = header_from_outside() | {"dense_backend": os.environ.get("WINNOW_DENSE_BACKEND"), "dtype": dtype}
        logs = log_folder or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        folders = {name: folder_of(name, Path(temporary), context + 2 * tokens) for name in models.split(",")}
        with ThreadPoolExecutor(len(folders) * len(numbers(sizes))) as threads:
            starting = {
                (name, size): threads.submit(
                    stack.enter_context,
                    serving(
                        folder,
                        size,
                        dtype,
                        context + 2 * tokens,
                        batch,
                        [asked[own] for own in names] if draft_tokens else (),
                        logs / f"{name}-{size}.log",
                    ),
                )
                for name, folder in folders.items()
                for size in numbers(sizes)
            }
            urls = {key: future.result() for key, future in starting.items()}
        for model, folder in folders.items():
            prompts = prompts_of(model, folder, context, batch)
            expected: dict[str, Answers] = {}
            for size in numbers(sizes):
                with BatchServer(urls[model, size], batch) as server:
                    for name in names:
                        got = ask(urls[model, size], server, prompts, tokens, asked[name])
                        rows.append(
                            row_of(model, name, asked[name], size, context, got, expected.setdefault(name, got))
                        )
                        console.print(line_of(rows[-1]))
                Record(about, rows).write(output)
    if any(row.parameters["numbers_equal"] is False for row in rows):
        raise typer.Exit(1)


def asked_with(draft_tokens: int) -> dict[str, Mapping[str, Any]]:
    """Return what is asked for, by name: verified if any tokens are drafted, as far as a policy drafts."""
    if not draft_tokens:
        return {name: own for name, own in POLICIES.items() if not PARAMETERS["decode"][kind_of(own)].drafts_only}
    verify = {"verify": {"draft_tokens": draft_tokens}}
    return {name: own if kind_of(own) == DENSE else {**own, **verify} for name, own in POLICIES.items()}


def kind_of(policy: Mapping[str, Any]) -> str:
    """Return the name of a request's decode policy."""
    return str(policy["decode"]["policy"])


def folder_of(model: str, folder: Path, longest: int) -> Path:
    """Return the folder that a model is served from."""
    if model == NEEDLE:
        return REPOSITORY / "models" / "needle"
    return write_model(folder, model, longest, shape_named(model).delta_layers)


@contextmanager
def serving(
    folder: Path, size: int, dtype: str, longest: int, batch: int, verified: Sequence[Mapping[str, Any]], log: Path
) -> Iterator[str]:
    """Serve on ``size`` GPUs until the block ends, with checks if anybody is ``verified``; the server's address."""
    weights = () if (folder / "model.safetensors.index.json").exists() else ("--load-format", "dummy")
    arguments = [
        *("--attention-backend", "winnow", "--tensor-parallel-size", str(size), *weights),
        *(("--dtype", dtype) if dtype else ()),
        *("--skip-tokenizer-init", "--incremental-streaming-output"),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--context-length", str(longest), "--max-running-requests", str(batch + ROOM_FOR_CHUNKED)),
        *("--cuda-graph-bs-decode", str(batch)),
        *("--max-total-tokens", str(2 * batch * longest)),
        *(("--speculative-algorithm", ALGORITHM) if verified else ()),
    ]
    # Servers that start side by side leave the GPUs unequal memory for a while.
    settings = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}
    if verified:
        settings[POLICIES_SETTING] = ",".join(sorted({kind_of(own) for own in verified} - {DENSE}))
    with runtime_server(folder, *arguments, log=log, **settings) as runtime:
        yield runtime.url


def prompts_of(model: str, folder: Path, context: int, batch: int) -> list[list[int]]:
    """Return what is asked."""
    if model in SHAPES:
        return Prompts(shape_named(model).vocab_size, seed=0)(context, batch)
    from transformers import AutoTokenizer  # noqa: PLC0415

    from benchmarks.needle_prompt import needle_prompt  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [needle_prompt(tokenizer, context, seed)[0] for seed in range(batch)]


def ask(
    url: str, server: BatchServer, prompts: Sequence[Sequence[int]], tokens: int, policy: Mapping[str, Any]
) -> Answers:
    """Ask all prompts twice, for what they say and for how fast.

    Raises:
        httpx.HTTPError: the server refuses.
    """
    parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": parameters | {"custom_params": {"attention": json.dumps(policy)}},
    }
    answers = httpx.post(f"{url}/generate", json=body, timeout=120).raise_for_status().json()
    timing = timing_of(server.ask(prompts, tokens, [policy] * len(prompts)))
    return Answers(
        [answer["output_ids"] for answer in answers],
        [answer["meta_info"]["attention"] for answer in answers],
        # Of verified answers several tokens come at once.
        timing.mean_tpot if "verify" in policy else timing.tpot,
    )


def row_of(
    model: str, name: str, policy: Mapping[str, Any], size: int, context: int, got: Answers, expected: Answers
) -> Row:
    """Return TPOT in ms, and what differs from ``expected``."""
    differences = [compare(*pair) for pair in zip(got.costs, expected.costs, strict=True)]
    return Row(
        bench=BENCH,
        model=model,
        policy=name,
        parameters={
            "figure": "tpot",
            "gpus": size,
            "attention": policy,
            "output_tokens": len(got.tokens[0]),
            "equal_tokens": [equal_tokens(*pair) for pair in zip(got.tokens, expected.tokens, strict=True)],
            "numbers_equal": None if "verify" in policy else all(alike for alike, _ in differences),
            "largest_difference_of_ratios": max(ratio for _, ratio in differences),
            "costs": list(got.costs),
        },
        context=context,
        batch=len(got.tokens),
        dense=expected.tpot * 1e3,
        measured=got.tpot * 1e3,
        unit="ms",
        speedup=expected.tpot / got.tpot,
        floor_ratio=None,
    )


def equal_tokens(own: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two answers have in common before they part."""
    return next((i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), len(own))


def compare(own: Any, other: Any) -> tuple[bool, float]:
    """Return whether all but the ratios in two ``attention`` objects is equal, and how far ratios lie apart."""
    if isinstance(own, Mapping) and isinstance(other, Mapping) and own.keys() == other.keys():
        parts = [compare(own[key], other[key]) for key in own]
        return all(alike for alike, _ in parts), max((ratio for _, ratio in parts), default=0.0)
    if isinstance(own, float) and isinstance(other, float):
        return True, abs(own - other)
    return own == other, 0.0


def line_of(row: Row) -> str:
    """Return a line about a row."""
    found = row.parameters
    return (
        f"{row.model}, {row.policy}, {found['gpus']} GPU: TPOT {row.measured:.2f} ms ({row.speedup:.2f}×), "
        f"equal tokens {found['equal_tokens']} of {found['output_tokens']}, "
        f"numbers equal: {found['numbers_equal']}, ratios within {found['largest_difference_of_ratios']:.1e}"
    )


if __name__ == "__main__":
    typer.run(main)
