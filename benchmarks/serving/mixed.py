"""What a batch of several policies costs beside batches of one policy each: a model of a named shape over HTTP.

    python -m benchmarks.serving.mixed --context 32768,98304 --gain 3.5 --output benchmarks/results/mixed.json

A server with Winnow is asked for batches of the same prompts: each policy alone, then all in turn from row to row. The
same follows with early termination on half of the rows of each policy, and with ``--cap`` once more with that cap on
the policies that take one. TPOT is the median over the steps in which all requests decode. ``times the mean`` is a
mixed batch's TPOT by the mean of those of its policies alone; ``most`` is what it may be at most.

A cap on two GPUs, where a trained model's policies read as little as with ``--gain``:

    python -m benchmarks.serving.mixed --policy tactic --policy lowbit_top_p --policy snapkv --policy quoka --gain 3.5 \
        --cap 4096 --server-arguments '--tp-size 2' --output benchmarks/results/mixed-two-gpus.json
"""

from __future__ import annotations

import shlex
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.command_line import numbers
from benchmarks.folders import RESULTS
from benchmarks.model_shapes import shape_named, write_model
from benchmarks.records import Record, Row, header_from_outside
from benchmarks.serving.serve import (
    DENSE,
    WINNOW,
    Cell,
    Contestant,
    Measured,
    Plan,
    arguments_of,
    environment_of,
    kinds_asked,
    pair_of,
    parse_contestant,
    progress,
    serve_and_measure,
)
from winnow_kernels.policies.attention_policy import parse_policy

BENCH: Final = "mixed"
MIXED: Final = "mixed"
PLAIN: Final = "plain"
TERMINATING: Final = "early termination on half"
CAPPED: Final = "capped"
_DEFAULT: Final = (
    'lowbit_top_p={"decode": {"policy": "lowbit_top_p", "p": 0.9}}',
    'lowbit_top_k={"decode": {"policy": "lowbit_top_k", "budget": 512}}',
    'quoka={"decode": {"policy": "quoka", "budget": 1024}}',
    'snapkv={"decode": {"policy": "snapkv", "budget": 1024}}',
)
# Tokens in a context, and what a mixed batch may take by the mean of its policies alone.
_LONG: Final = 65_536
_BOUNDS: Final = (1.25, 1.10)
_OUTPUT: Final = RESULTS / "mixed.json"

console = Console(width=150)


@dataclass(frozen=True)
class Mixture(Contestant):
    """Policies that rows have in turn.

    Attributes:
        group: of the batches that are compared with each other.
        asked: the policies.
    """

    group: str = PLAIN
    asked: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, name: str, group: str, asked: Sequence[Mapping[str, Any]]) -> Mixture:
        """Return the policies ``asked`` under a name."""
        return cls(name, {"mixture": list(asked)}, group=group, asked=tuple(asked))

    def policies(self, batch: int) -> list[Mapping[str, Any] | None]:
        return [self.asked[row % len(self.asked)] for row in range(batch)]


def main(
    model: Annotated[str, typer.Option(help="A name in benchmarks/model_shapes.py.")] = "Llama-3.1-8B",
    context: Annotated[str, typer.Option(help="Tokens of a prompt, with commas between.")] = "32768,98304",
    batch: Annotated[int, typer.Option(min=2, help="Requests at once.")] = 8,
    output_tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer.")] = 128,
    policy: Annotated[
        list[str] | None, typer.Option(help="NAME, or NAME=JSON of the request's attention; four if none is named.")
    ] = None,
    early_termination: Annotated[str, typer.Option(help="JSON of its thresholds.")] = "{}",
    cap: Annotated[int | None, typer.Option(min=1, help="Tokens, of policies that take a cap.")] = None,
    gain: Annotated[float | None, typer.Option(min=0, help="As of benchmarks.serving.serve.")] = None,
    server_arguments: Annotated[str, typer.Option(help="Passed on to the server.")] = "",
    winnow_environment: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the server; may be repeated.")
    ] = None,
    log_folder: Annotated[Path | None, typer.Option(help="Where the server's log is left.")] = None,
    output: Annotated[Path, typer.Option(help="Where to write JSON, after each batch.")] = _OUTPUT,
) -> None:
    """Measure, print a table, write JSON. Exit with 1 if the server failed."""
    alone = [parse_contestant(text) for text in policy or _DEFAULT]
    thresholds = parse_contestant(f'ended={{"early_termination": {early_termination}}}').policy or {}
    mixtures = mixtures_of(alone, thresholds["early_termination"], cap)
    plan = Plan(
        model, [Cell(tokens, batch) for tokens in numbers(context)], mixtures, output_tokens, 1, fresh=False, seed=0
    )
    shape = shape_named(model)
    environment = {"WINNOW_POLICIES": ",".join(sorted(kinds_asked(alone)))}
    environment |= dict(pair_of(text, "--winnow-environment") for text in winnow_environment or [])
    about = header_from_outside() | {
        "server_arguments": server_arguments,
        "winnow_environment": environment,
        "gain": gain,
        "delta_layers": shape.delta_layers,
    }
    found: list[Measured] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(Path(temporary), model, plan.context_length, shape.delta_layers)
        logs = log_folder or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        arguments = [*arguments_of(plan, WINNOW, [WINNOW]), *shlex.split(server_arguments)]
        own = environment_of(WINNOW, environment, gain)
        try:
            for measured in serve_and_measure(folder, WINNOW, plan, arguments, logs, own, failures):
                console.print(progress(measured))
                found.append(measured)
                Record(about | {"failures": failures}, rows_of(found, model)).write(output)
        except (RuntimeError, httpx.HTTPError) as error:
            failures.append(str(error))
            console.print(Text(failures[-1], style="red"))
    rows = rows_of(found, model)
    Record(about | {"failures": failures}, rows).write(output)
    console.print(table(rows))
    if failures:
        raise typer.Exit(1)


def mixtures_of(alone: Sequence[Contestant], early_termination: Mapping[str, Any], cap: int | None) -> list[Mixture]:
    """Return each policy alone and all mixed: as they are, with early termination on half of the rows, and capped.

    Raises:
        typer.BadParameter: there is a cap, and no policy takes it.
    """
    groups: dict[str, list[list[Mapping[str, Any]]]] = {}
    asked = [contestant.policy or {} for contestant in alone]
    groups[PLAIN] = [[each] for each in asked]
    groups[TERMINATING] = [[each, {**each, "early_termination": early_termination}] for each in asked]
    if cap is not None:
        groups[CAPPED] = [[_capped(each, cap)] for each in asked]
        if groups[CAPPED] == groups[PLAIN]:
            raise typer.BadParameter("no policy takes max_tokens", param_hint="--cap")
    names = [contestant.name for contestant in alone]
    mixtures = []
    for group, own in groups.items():
        mixtures += [Mixture.of(name, group, rows) for name, rows in zip(names, own, strict=True)]
        # Row by row, so that half of each policy's rows end early in a batch that holds all.
        mixtures.append(Mixture.of(MIXED, group, [each for turn in zip(*own, strict=True) for each in turn]))
    return mixtures


def rows_of(found: Sequence[Measured], model: str) -> list[Row]:
    """Return a row for each batch; of mixed ones with what their policies alone take on average."""
    return [_row(measured, found, model) for measured in found]


def table(rows: Sequence[Row]) -> Table:
    """Return a table of the rows."""
    result = Table("context", "batch", "rows", "policy", "ms a token", "spread", "dense", "mean alone", "times", "most")
    for row in rows:
        mean, times = row.parameters["mean_alone"], row.parameters["times_the_mean"]
        result.add_row(
            str(row.context),
            str(row.batch),
            row.parameters["group"],
            row.policy,
            f"{row.measured:.2f}",
            "" if row.spread is None else f"{row.spread:.1%}",
            "" if row.dense is None else f"{row.dense:.2f}",
            "" if mean is None else f"{mean:.2f}",
            "" if times is None else f"{times:.3f}",
            "" if times is None else f"{row.parameters['most']:.2f}",
        )
    return result


def _row(measured: Measured, found: Sequence[Measured], model: str) -> Row:
    contestant, cell = measured.contestant, measured.cell
    group = contestant.group if isinstance(contestant, Mixture) else DENSE
    beside = [other for other in found if other.cell == cell]
    dense = [_milliseconds(other) for other in beside if not isinstance(other.contestant, Mixture)]
    alone = [
        _milliseconds(other)
        for other in beside
        if isinstance(other.contestant, Mixture) and other.contestant.group == group and other.contestant.name != MIXED
    ]
    tpot = _milliseconds(measured)
    mean = statistics.fmean(alone) if contestant.name == MIXED and alone else None
    return Row(
        bench=BENCH,
        model=model,
        policy=contestant.name,
        parameters={
            "figure": "tpot",
            "group": group,
            "attention": contestant.policy,
            "output_tokens": measured.output_tokens,
            "steps": measured.timing.steps,
            "kv_read_ratio": measured.timing.kv_read_ratio,
            "mean_alone": mean,
            "times_the_mean": None if mean is None else tpot / mean,
            "most": _BOUNDS[cell.context > _LONG],
        },
        context=cell.context,
        batch=cell.batch,
        dense=dense[0] if dense else None,
        measured=tpot,
        unit="ms",
        speedup=dense[0] / tpot if dense else None,
        floor_ratio=None,
        spread=measured.timing.tpot_spread,
    )


def _milliseconds(measured: Measured) -> float:
    return 1e3 * measured.timing.tpot


def _capped(policy: Mapping[str, Any], cap: int) -> Mapping[str, Any]:
    """Return the policy with a cap, if its decode policy takes one."""
    decode = parse_policy(policy).decode
    return {**policy, "decode": {**policy["decode"], "max_tokens": cap}} if hasattr(decode, "max_tokens") else policy


if __name__ == "__main__":
    typer.run(main)
