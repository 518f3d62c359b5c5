"""What a layer's attention costs on a GPU in a batch of several policies, beside batches of one policy each.

    python -m benchmarks.kernels.mixed --cases 98304x8,32768x8 --output benchmarks/results/mixed-layer.json

Each policy is timed alone, then all in turn from row to row, in a CUDA graph of their selectors; all as in
``benchmarks.kernels.layer``, with a layer's share of what is done once a step. ``side by side`` is the graph that a
server captures, ``one after another`` the same launches on one stream. The same follows with early termination that
never settles on half of the rows of each policy. ``times the mean`` is a mixed batch's time by the mean of those of its
policies alone.

Before that the mixed batch is checked: a replayed graph gives the bits that the same launches give without a graph,
and each row those that it has in a batch of its own policy.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.folders import RESULTS
from benchmarks.kernels.cases import Case, parse_cases
from benchmarks.kernels.decode_requests import Contexts, Requests, measured_length
from benchmarks.kernels.layer import DTYPE, NEVER_SETTLES, Timer, heads_of, layers_for
from benchmarks.kernels.timing import Timing, gpu
from benchmarks.model_shapes import shape_named
from benchmarks.records import Record, Row, header
from sglang_winnow import crossover
from sglang_winnow.device.lanes import Lanes
from winnow_kernels.batch import Count
from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy

BENCH: Final = "mixed layer"
MIXED: Final = "mixed"
PLAIN: Final = "plain"
TERMINATING: Final = "early termination on half"
SIDE_BY_SIDE: Final = "side by side"
ONE_AFTER_ANOTHER: Final = "one after another"
CHECKED: Final = 40_000
_CHECKED_LAYERS: Final = 2
_DEFAULT: Final = (
    '{"policy": "snapkv", "budget": 1024}',
    '{"policy": "lowbit_top_p", "p": 0.9}',
    '{"policy": "lowbit_top_k", "budget": 512}',
    '{"policy": "quoka", "budget": 1024}',
)


def main(
    output: Annotated[Path, typer.Option(help="Where to write JSON.")] = RESULTS / "mixed-layer.json",
    model: Annotated[str, typer.Option(help="Whose layers: a name in benchmarks/model_shapes.py.")] = "Llama-3.1-8B",
    cases: Annotated[str, typer.Option(help="Tokens in context × batch.")] = "98304x8,32768x8",
    policy: Annotated[list[str] | None, typer.Option(help="JSON of a decode policy; four if none is named.")] = None,
    replays: Annotated[int, typer.Option(min=2, help="Graph replays of each measurement.")] = 30,
    memory: Annotated[float, typer.Option(help="Share of free device memory for keys and values.")] = 0.6,
) -> None:
    """Check, measure, print a table, write JSON after each case. Exit with 1 if a row is not what it is alone."""
    device = gpu()
    os.environ[crossover.ENVIRONMENT] = "0"
    policies = [parse_policy({"decode": json.loads(text)}) for text in policy or _DEFAULT]
    shape = shape_named(model)
    console = Console(width=150)
    checked = Contexts(heads_of(shape), CHECKED, 2 * len(policies), _CHECKED_LAYERS, device, DTYPE)
    wrong = {group: differing_rows(checked, rows, replayed) for group, rows in groups_of(policies).items()}
    del checked
    rows: list[Row] = []
    for case in parse_cases(cases):
        layers = layers_for(case, shape, int(torch.cuda.mem_get_info()[0] * memory))
        contexts = Contexts(heads_of(shape), measured_length(case.context), case.batch, layers, device, DTYPE)
        timer = Timer(contexts, torch.cuda.get_device_properties(device).L2_cache_size, replays)
        rows += measure(case, model, policies, timer)
        del contexts, timer
        Record(header() | {"differing_rows": wrong}, rows).write(output)
        torch.cuda.empty_cache()
    console.print(table(rows))
    if any(wrong.values()):
        console.print("[red]not as alone:", wrong)
        raise typer.Exit(1)


def groups_of(policies: Sequence[AttentionPolicy]) -> dict[str, list[AttentionPolicy]]:
    """Return what the rows of mixed batches have in turn."""
    never = EarlyTermination.model_validate(NEVER_SETTLES)
    ending = [policy.model_copy(update={"early_termination": never}) for policy in policies]
    return {PLAIN: list(policies), TERMINATING: [*policies, *ending]}


def differing_rows(
    contexts: Contexts, policies: Sequence[AttentionPolicy], run: Callable[[Callable[[], None]], None]
) -> list[int]:
    """Return the rows that are not, to the last bit, what they are in a batch of their own policy.

    Args:
        contexts: with a row for each policy at least.
        policies: of the rows, in turn.
        run: runs what attends in a layer of the mixed batch.
    """
    layers = range(contexts.layers)
    mixed = Requests(contexts, *policies)
    found = _outputs(mixed, lambda call: call())
    again = _outputs(mixed, run)
    wrong = {row for row in range(contexts.rows) if not torch.equal(found[:, row], again[:, row])}
    for first, policy in enumerate(policies):
        alone = _outputs(Requests(contexts, policy), lambda call: call())
        own = range(first, contexts.rows, len(policies))
        wrong |= {row for row in own for layer in layers if not torch.equal(found[layer, row], alone[layer, row])}
    return sorted(wrong)


def replayed(call: Callable[[], None]) -> None:
    """Capture ``call``, which has run before, and replay it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()


def measure(case: Case, model: str, policies: Sequence[AttentionPolicy], timer: Timer) -> Iterator[Row]:
    """Time each policy alone and all mixed, as they are and with early termination on half of the rows."""
    layers_of_model = shape_named(model).layers
    for group, rows in groups_of(policies).items():
        alone: list[float] = []
        for first, policy in enumerate(policies):
            timing = layer_time(Requests(timer.contexts, *rows[first :: len(policies)]), timer, layers_of_model)
            alone.append(timing.microseconds)
            yield _row(case, model, policy.decode.policy, group, SIDE_BY_SIDE, timing, None)
        mean = statistics.fmean(alone)
        mixed = Requests(timer.contexts, *rows)
        timing = layer_time(mixed, timer, layers_of_model)
        yield _row(case, model, MIXED, group, SIDE_BY_SIDE, timing, mean)
        mixed.decode.lanes = Lanes(1, timer.contexts.device)
        timing = layer_time(mixed, timer, layers_of_model)
        yield _row(case, model, MIXED, group, ONE_AFTER_ANOTHER, timing, mean)


def layer_time(requests: Requests, timer: Timer, layers_of_model: int) -> Timing:
    """Return what a layer takes, with its share of what is done once a step."""
    everywhere = range(requests.contexts.layers)
    once = timer(lambda _layer, _step: requests.once_a_step(), everywhere, 0)
    timing = timer(requests.attend, everywhere, requests.counts(everywhere)[Count.READ_BYTES], requests.walk)
    return replace(timing, microseconds=timing.microseconds + once.microseconds / layers_of_model)


def table(rows: Sequence[Row]) -> Table:
    """Return a table of the rows."""
    result = Table("context", "batch", "rows", "policy", "launches", "µs", "spread", "mean alone", "times the mean")
    for row in rows:
        labels = row.parameters
        mean, times = labels["mean_alone"], labels["times_the_mean"]
        result.add_row(
            str(row.context),
            str(row.batch),
            labels["group"],
            row.policy,
            labels["launches"],
            f"{row.measured:.1f}",
            f"{row.spread or 0:.1%}",
            "" if mean is None else f"{mean:.1f}",
            "" if times is None else f"{times:.3f}",
        )
    return result


def _outputs(requests: Requests, run: Callable[[Callable[[], None]], None]) -> Tensor:
    """Return the outputs of all layers: [layers, rows, query heads, head dim]."""
    outputs = []
    for layer in range(requests.contexts.layers):
        run(lambda number=layer: requests.attend(number))  # type: ignore[misc]
        outputs.append(requests.output.clone())
    return torch.stack(outputs)


def _row(case: Case, model: str, policy: str, group: str, launches: str, timing: Timing, mean: float | None) -> Row:
    return Row(
        bench=BENCH,
        model=model,
        policy=policy,
        parameters={
            "group": group,
            "launches": launches,
            "mean_alone": mean,
            "times_the_mean": None if mean is None else timing.microseconds / mean,
        },
        context=case.context,
        batch=case.batch,
        dense=None,
        measured=timing.microseconds,
        unit="µs",
        speedup=None,
        floor_ratio=None,
        spread=timing.spread,
    )


if __name__ == "__main__":
    typer.run(main)
