"""Long answers of a real model to real text, all at once: what verification saves, and whose tokens they are.

    python -m benchmarks.serving.verified_answers ~/.cache/winnow/models/smollm2-32k --output verified-answers.json

Prompts are cut out of real text, as for ``winnow fidelity``, or are a task's of ``winnow eval``, and in the radix cache
when answers begin. All are answered greedily by dense attention, then by half as many at once and one at a time, then
verified, with each policy. In 16 bits dense attention itself gives other tokens in a batch of another size: verified
answers are to differ no more. Where an answer parts from the dense one, the log-probabilities of the two tokens tell
whether it was a tie.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.markdown import Markdown

from benchmarks.cpu.verification import prompts_of
from benchmarks.folders import RESULTS
from benchmarks.generate_stream import GenerateClient, WholeAnswer, request_body
from benchmarks.records import Record, Row, header_from_outside
from benchmarks.serving.serve import kinds_asked, parse_contestant
from benchmarks.serving.tables import answers_markdown
from benchmarks.serving.tp_equality import equal_tokens
from sglang_winnow.backend_name import NAME
from sglang_winnow.crossover import ENVIRONMENT
from tests.runtime import runtime_server
from winnow_evaluation.offline_model import OfflineModel
from winnow_evaluation.options import parse_tasks
from winnow_evaluation.tasks import TASKS
from winnow_evaluation.text.documents import KINDS
from winnow_kernels.contract.verification import ALGORITHM
from winnow_kernels.policies.registry import POLICIES_SETTING

BENCH: Final = "verified answers"
DENSE: Final = "dense"
HALVES: Final = "dense, half as many at once"
ALONE: Final = "dense, one at a time"
_DEFAULT: Final = (
    'lowbit_top_k={"decode": {"policy": "lowbit_top_k", "budget": 512}, "verify": {"draft_tokens": 4}}',
    'verified_pages={"decode": {"policy": "verified_pages", "budget": 1024}, "verify": {"draft_tokens": 4}}',
)
_OUTPUT: Final = RESULTS / "verified-answers.json"
_STREAM_INTERVAL: Final = 128
# SGLang keeps some of a cache to itself, and drafts need room behind each answer.
_SPARE_TOKENS: Final = 128

console = Console(width=150)


@dataclass(frozen=True)
class Answered:
    """All answers.

    Attributes:
        seconds: from the first request sent to the last answer's end.
        tokens: of each.
        cost: what each tells of its attention.
    """

    seconds: float
    tokens: Sequence[Sequence[int]]
    cost: Sequence[Mapping[str, Any]]


def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model to serve.")],
    context: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 32_000,
    tokens: Annotated[int, typer.Option(min=3, help="Tokens of an answer.")] = 512,
    prompts: Annotated[int, typer.Option(min=2, help="Prompts, of all kinds of text together.")] = 32,
    text: Annotated[str, typer.Option(help="Kinds of text, or names of tasks, with commas between.")] = ",".join(KINDS),
    policy: Annotated[list[str] | None, typer.Option(help="NAME=JSON of the request's attention.")] = None,
    server_argument: Annotated[list[str] | None, typer.Option(help="One more; may be repeated.")] = None,
    output: Annotated[Path, typer.Option(help="Where to write JSON, after each policy.")] = _OUTPUT,
) -> None:
    """Measure, print a table, write JSON."""
    contestants = [parse_contestant(one) for one in policy or _DEFAULT]
    offline = OfflineModel(model, torch.device("cpu"))
    kinds = parse_tasks(text, (*KINDS, *TASKS))
    each = -(-prompts // len(kinds))
    found = [own.tokens for kind in kinds for own in prompts_of(offline, kind, context, tokens, each)][:prompts]
    about = header_from_outside() | {"texts": kinds, "tokens": tokens}
    arguments = ["--attention-backend", NAME, "--speculative-algorithm", ALGORITHM]
    arguments += ["--max-total-tokens", str((context + tokens + _SPARE_TOKENS) * prompts)]
    arguments += ["--max-running-requests", str(prompts), "--cuda-graph-max-bs", str(prompts)]
    environment = {ENVIRONMENT: "0", POLICIES_SETTING: ",".join(sorted(kinds_asked(contestants)))}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with (
            runtime_server(model, *arguments, *(server_argument or []), log=log, **environment) as runtime,
            GenerateClient(runtime.url, prompts) as server,
        ):
            ask_all(server, found, 2, None, prompts)
            dense = ask_all(server, found, tokens, None, prompts)
            others = {HALVES: prompts // 2, ALONE: 1}
            rows.append(row_of(DENSE, dense, dense, None, offline.name, context))
            for name, at_once in others.items():
                answered = ask_all(server, found, tokens, None, at_once)
                lead = largest_lead(server, found, dense, answered)
                rows.append(row_of(name, answered, dense, lead, offline.name, context))
            for contestant in contestants:
                # What is compiled or captured at its first use is not in it.
                ask_all(server, found[:2], 16, contestant.policy, prompts)
                answered = ask_all(server, found, tokens, contestant.policy, prompts)
                lead = largest_lead(server, found, dense, answered)
                rows.append(row_of(contestant.name, answered, dense, lead, offline.name, context))
                Record(about, rows).write(output)
                console.print(Markdown(answers_markdown(rows)))


def largest_lead(
    server: GenerateClient, prompts: Sequence[Sequence[int]], dense: Answered, answered: Answered
) -> float | None:
    """Return by how much dense attention prefers its own token where answers part, at most; None if none do.

    That is a difference of log-probabilities: about 0 at ties.
    """
    leads = []
    for prompt, expected, tokens in zip(prompts, dense.tokens, answered.tokens, strict=True):
        alike = equal_tokens(tokens, expected)
        if alike < len(expected):
            own, other = server.log_probabilities([*prompt, *expected[:alike]], [expected[alike], tokens[alike]])
            leads.append(own - other)
    return max(leads, default=None)


def row_of(name: str, answered: Answered, dense: Answered, lead: float | None, model: str, context: int) -> Row:
    """Return what answers took, beside those of dense attention; ``lead`` as ``largest_lead`` tells it."""
    pairs = list(zip(answered.tokens, dense.tokens, strict=True))
    checks = [cost["verify"] for cost in answered.cost if cost.get("verify")]
    verifications = sum(check["verifications"] for check in checks)
    accepted = sum(check["accepted"] for check in checks)
    parameters = {
        "tokens_per_check": 1 + accepted / verifications if verifications else None,
        "kv_read_ratio": fmean(cost["decode"]["kv_read_ratio"] for cost in answered.cost),
        "equal_answers": sum(list(own) == list(other) for own, other in pairs),
        "equal_tokens": fmean(equal_tokens(own, other) for own, other in pairs),
        "largest_lead": lead,
    }
    return Row(
        bench=BENCH,
        model=model,
        policy=name,
        parameters=parameters,
        context=context,
        batch=len(pairs),
        dense=dense.seconds,
        measured=answered.seconds,
        unit="s",
        speedup=dense.seconds / answered.seconds,
        floor_ratio=None,
    )


def ask_all(
    server: GenerateClient,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    attention: Mapping[str, Any] | None,
    at_once: int,
) -> Answered:
    """Return the answers to all prompts, ``at_once`` of them asked at a time.

    Raises:
        httpx.HTTPError: the server refuses.
        RuntimeError: it fails.
    """
    bodies = [
        json.dumps(request_body(prompt, tokens, attention, stream_interval=_STREAM_INTERVAL)) for prompt in prompts
    ]
    found: list[WholeAnswer] = []
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        for first in range(0, len(bodies), at_once):
            found += pool.map(server.answer, bodies[first : first + at_once])
    return Answered(time.perf_counter() - began, [own.tokens for own in found], [own.attention for own in found])


if __name__ == "__main__":
    typer.run(main)
