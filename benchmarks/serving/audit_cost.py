"""What audits cost: a token's time beside the same answers without audits, on a server with them and on one without.

    python -m benchmarks.serving.audit_cost --output benchmarks/results/audit-tpot.json

Two servers of the same shape, with random weights, hold a GPU together: one was started with ``WINNOW_AUDIT=0``, the
other without. They are asked for the same batch of answers in turns, never both at once, so that clocks and
temperatures are alike. The first server is asked with several shares of audited steps, with and without the comparison
of next tokens, all requests of a batch alike. Figures are medians over the rounds.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from benchmarks.folders import RESULTS
from benchmarks.model_shapes import shape_named, write_model
from benchmarks.records import Record, header_from_outside
from benchmarks.serving.batch_timing import BatchServer, BatchTiming, median_timing, timing_of
from benchmarks.serving.serve import WINNOW, Cell, Contestant, Measured, Plan, Prompts, arguments_of, progress, rows_of
from sglang_winnow.audit_share import ENVIRONMENT
from tests.runtime import runtime_server
from winnow_kernels.policies.attention_policy import parse_policy
from winnow_kernels.policies.registry import POLICIES_SETTING

SHARES: Final = (0.0, 0.01, 0.1)
COMPARED_SHARES: Final = (0.01, 0.1)
WITHOUT: Final = "server without audits"
_DECODE: Final = '{"policy": "lowbit_top_k", "budget": 2048}'
_WARM_UP_TOKENS: Final = 8
_OUTPUT: Final = RESULTS / "audit-tpot.json"

console = Console(width=150)


@dataclass(frozen=True)
class Asked:
    """One way to ask, of one of the servers.

    Attributes:
        contestant: the policy, under its name in the table.
        audits: whether the server was started with audits.
    """

    contestant: Contestant
    audits: bool


def ways(decode: Mapping[str, Any]) -> list[Asked]:
    """Return how the servers are asked, in turn: first what others are compared with."""
    name, policy = decode["policy"], {"decode": dict(decode)}

    def audited(label: str, audit: Any) -> Asked:
        return Asked(Contestant(f"{name}, {label}", policy | {"audit": audit}), audits=True)

    return [
        Asked(Contestant(name, policy), audits=True),
        Asked(Contestant(f"{name}, {WITHOUT}", policy), audits=False),
        *(audited(f"audit {share:g}", share) for share in SHARES),
        *(audited(f"audit {share:g} with KL", {"share": share, "kl": True}) for share in COMPARED_SHARES),
    ]


def measure(
    servers: Mapping[bool, BatchServer], asked: Sequence[Asked], plan: Plan, vocab_size: int, rounds: int
) -> Iterator[Measured]:
    """Yield how fast each way is answered: the median over ``rounds`` in which they take turns.

    Args:
        servers: by whether they audit.
        asked: the ways.
        plan: with a single cell.
        vocab_size: of the model.
        rounds: behind a first one that is not counted.

    Raises:
        RuntimeError: a server fails.
        ValueError: the requests of a batch decoded together for too few steps.
    """
    [cell] = plan.cells
    prompts = Prompts(vocab_size, plan.seed)(cell.context, cell.batch)
    timings: list[list[BatchTiming]] = [[] for _ in asked]
    for number in range(rounds + 1):
        tokens = plan.output_tokens if number else _WARM_UP_TOKENS
        for each, found in zip(asked, timings, strict=True):
            streams = servers[each.audits].ask(prompts, tokens, each.contestant.policies(cell.batch))
            if number:
                found.append(timing_of(streams))
    room = {audits: server.cache_tokens() for audits, server in servers.items()}
    for each, found in zip(asked, timings, strict=True):
        own = median_timing(found)
        yield Measured(WINNOW, cell, each.contestant, plan.output_tokens, own, room[each.audits], None)


def main(
    model: Annotated[str, typer.Option(help="A name in benchmarks/model_shapes.py.")] = "Llama-3.1-8B",
    context: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 32768,
    batch: Annotated[int, typer.Option(help="Requests at once.")] = 8,
    output_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 256,
    rounds: Annotated[int, typer.Option(help="In which all ways take turns.", min=1)] = 3,
    decode: Annotated[str, typer.Option(help="The decode policy, in JSON.")] = _DECODE,
    server_arguments: Annotated[str, typer.Option(help="Of both servers, beside the benchmark's own.")] = "",
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    log_folder: Annotated[Path | None, typer.Option(help="For the servers' logs.")] = None,
    output: Annotated[Path, typer.Option(help="Where to write.")] = _OUTPUT,
) -> None:
    """Measure what audits cost."""
    own: dict[str, Any] = json.loads(decode)
    parse_policy({"decode": own})
    plan = Plan(model, [Cell(context, batch)], [], output_tokens, 1, fresh=False, seed=seed)
    # Half of the GPU's memory is for the other server. A prompt that is prefilled in chunks counts twice.
    room = (batch + 1) * plan.longest
    more = ["--max-total-tokens", str(room), *shlex.split(server_arguments)]
    environment = {POLICIES_SETTING: own["policy"]}
    about = header_from_outside() | {
        "server_arguments": shlex.join(more),
        "winnow_environment": environment,
        "rounds": rounds,
        "servers_at_once": 2,
    }
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as scratch:
        shape = shape_named(model)
        folder = write_model(Path(scratch), model, plan.context_length, shape.delta_layers)
        logs = log_folder or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        arguments = [*arguments_of(plan, WINNOW, [WINNOW]), *more]
        with (
            runtime_server(
                folder, *arguments, log=logs / "audits.log", **environment, **{ENVIRONMENT: "0"}
            ) as with_audits,
            runtime_server(folder, *arguments, log=logs / "without.log", **environment) as without,
            BatchServer(with_audits.url, batch) as auditing,
            BatchServer(without.url, batch) as other,
        ):
            servers = {True: auditing, False: other}
            for measured in measure(servers, ways(own), plan, shape.vocab_size, rounds):
                console.print(progress(measured))
                found.append(measured)
    Record(about, rows_of(found, model)).write(output)


if __name__ == "__main__":
    typer.run(main)
