"""What a layer's attention costs with each policy on a GPU: its stages, and the whole beside dense decode.

    python -m benchmarks.kernels.layer --cases 32768x8 --output benchmarks/results/attention.json

Every policy is first compared with the torch reference on a small context. Then CUDA graphs are timed that go round
the layers, so that no call finds in L2 what it reads. Stages:

    layer    all that a sparse layer takes, and its share of what is done once a step
    select   what comes before attention
    attend   attention to what was selected
    step     what is done once a step, whatever the number of layers: parameters, page indexes, counts

``dense`` is the fastest of FlashInfer's decode (tensor cores) and, where sgl_kernel has it, FlashAttention 3, timed in
the same run before and after the policies. A floor is the time in which the bytes that a stage must read, the index
among them, would be read with the bandwidth that dense decode reaches. With ``--kv-cache-dtype fp8_e4m3`` all of them
read keys and values in 8 bits, and SGLang's Triton kernels compete, too.

``delta`` is averaged over the layers of a model with the given Δ-layers: before the first they are dense, the Δ-layers
read everything and select, all others reuse; rows tell them apart, too. ``quest`` has no dense layers here, unlike its
default. ``tactic`` runs with the ``p`` with which its KV heads read the given share of their contexts; it is searched
for, and so is that of ``lowbit_top_p``; ``lowbit_top_k`` has the share for its budget. All contexts have the keys of
``benchmarks.kernels.tactic_keys``, and are half a span shorter than their name says (``measured_length``).

What low-bit codes are searched for begins where the last step, or a sample, tells to begin. So their queries drift from
step to step, and rows tell how often that place was wrong: ``marked_again_percent`` of layers and steps,
``counted_again_percent`` of heads. They have a further stage, ``build``: what it takes to write a layer's codes, of all
contexts. Whoever selects in layers has one for each kernel of a layer, ``kernel NAME``, from the profiler.

    python -m benchmarks.kernels.layer on-captured captured.pt --cases 131072x8 --shares 0.9

times these policies on keys that ``benchmarks.kernels.captured_keys`` has of a real model, with that model's heads.

Early termination is timed with patience that is infinite, and such that no row ever settles: what deciding costs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import numbers
from benchmarks.folders import RESULTS
from benchmarks.kernels.captured_keys import CapturedKeys
from benchmarks.kernels.cases import KERNEL, Case, cache_dtype_named, parse_cases, relative_error, wrong_errors
from benchmarks.kernels.decode_requests import Contexts, Heads, Requests, measured_length, reference
from benchmarks.kernels.dense_decode import DenseDecode, dense_decodes
from benchmarks.kernels.timing import Timing, calls_beyond_cache, gpu, kernel_times, time_calls
from benchmarks.model_shapes import ModelShape, shape_named
from benchmarks.records import Record, Row, header, merged
from sglang_winnow import crossover
from winnow_kernels.batch import Count
from winnow_kernels.contract.early_termination import MAX_PATIENCE
from winnow_kernels.decode.statistics import Field
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy

BENCH: Final = "attention"
DTYPE: Final = torch.bfloat16
CHECKED_CONTEXT: Final = 8192
_CHECKED_ROWS: Final = 2
_CHECKED_LAYERS: Final = 4
_MAX_LAYERS: Final = 48
_SMALLEST_SELECTION: Final = 1024
_UNION_TOLERANCE: Final = 0.02
_HALVINGS: Final = 16

_NONE: Final = "none"
_INFINITE: Final = "infinite patience"
_NEVER: Final = "never settled"
NEVER_SETTLES: Final = {"scale": 1e-9, "direction": 1e-9, "patience": MAX_PATIENCE}
TERMINATIONS: Final = (_NONE, _INFINITE, _NEVER)
# In a layer: StreamingLLM selects once a step.
_NOTHING_TO_SELECT: Final = ("dense", "streaming_llm")

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Contestant:
    """A policy to be timed.

    Attributes:
        name: of the policy.
        decode: as a request asks for it.
        parameters: what tells its rows apart from others of the same name.
        terminations: with which of ``TERMINATIONS`` it is timed.
        union: the share of the context that a KV head reads: a ``p`` is searched for it; None for that of ``decode``.
    """

    name: str
    decode: Mapping[str, Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    terminations: Sequence[str] = (_NONE,)
    union: float | None = None

    def policy(self, termination: str, **more: Any) -> AttentionPolicy:
        """Return the policy with one of ``TERMINATIONS``, its decode policy with ``more``."""
        asked: dict[str, Any] = {"decode": {"policy": self.name, **self.decode, **more}}
        if termination == _NEVER:
            asked["early_termination"] = NEVER_SETTLES
        return parse_policy(asked)


@dataclass(frozen=True)
class Stage:
    """What a policy takes in a stage: microseconds, and the bytes that it reads of KV cache and index, if known."""

    name: str
    timing: Timing
    read_bytes: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@app.command()
def run(
    output: Annotated[Path, typer.Option(help="Where to write JSON.")] = RESULTS / "attention.json",
    model: Annotated[str, typer.Option(help="Whose layers: a name in benchmarks/model_shapes.py.")] = "Llama-3.1-8B",
    cases: Annotated[
        str, typer.Option(help="Tokens in context × batch.")
    ] = "32768x1,32768x8,32768x32,131072x1,131072x8",
    policies: Annotated[str, typer.Option(help="Names with commas between; all if empty.")] = "",
    unions: Annotated[
        str, typer.Option(help="Percent of the context that a KV head reads with tactic and low-bit keys.")
    ] = "3,5,12",
    delta_layers: Annotated[str, typer.Option(help="Of the model; its own if empty.")] = "",
    sinks: Annotated[str, typer.Option(help="Time each policy with each of these; its own default if empty.")] = "",
    replays: Annotated[int, typer.Option(min=2, help="Graph replays of each measurement.")] = 30,
    memory: Annotated[float, typer.Option(help="Share of free device memory for keys and values.")] = 0.6,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, or fp8_e4m3.")] = "auto",
) -> None:
    """Check, measure, print a table, write JSON after each case. Exit with 1 if a policy differs from its reference."""
    device = gpu()
    # Policies act at every length.
    os.environ[crossover.ENVIRONMENT] = "0"
    shape, cache_dtype = shape_named(model), cache_dtype_named(kv_cache_dtype)
    refreshing = numbers(delta_layers) or list(shape.delta_layers)
    contestants = with_sinks(_chosen(contestants_of(numbers(unions), refreshing), policies), numbers(sinks))
    torch.manual_seed(0)
    console = Console(width=150)
    errors = check(heads_of(shape), contestants, measured_length(CHECKED_CONTEXT), device, DTYPE, cache_dtype)
    about = header() | {"delta_layers": refreshing, "errors": errors}
    rows: list[Row] = []
    for case in parse_cases(cases):
        layers = layers_for(case, shape, int(torch.cuda.mem_get_info()[0] * memory), dtype=cache_dtype)
        if layers < 3:
            console.print(f"[red]left out: of {case} only {layers} layers fit")
            continue
        rows += measure(case, model, contestants, refreshing, layers, replays, device, cache_dtype)
        Record(about, rows).write(output)
        torch.cuda.empty_cache()
    console.print(table(rows))
    if wrong := wrong_errors(errors):
        console.print("[red]not as the reference:", wrong)
        raise typer.Exit(1)


@app.command()
def on_captured(
    captured: Annotated[Path, typer.Argument(help="What benchmarks.kernels.captured_keys wrote.")],
    output: Annotated[Path, typer.Option(help="Where to write JSON.")] = RESULTS / "attention-captured.json",
    cases: Annotated[str, typer.Option(help="Tokens in context × batch.")] = "32768x8,131072x8",
    shares: Annotated[str, typer.Option(help="lowbit_top_p's p, with commas between.")] = "0.9",
    budgets: Annotated[str, typer.Option(help="lowbit_top_k's tokens, with commas between.")] = "1024",
    replays: Annotated[int, typer.Option(min=2, help="Graph replays of each measurement.")] = 30,
    memory: Annotated[float, typer.Option(help="Share of free device memory for keys and values.")] = 0.6,
) -> None:
    """Measure on a real model's keys, print a table, write JSON after each case."""
    device = gpu()
    os.environ[crossover.ENVIRONMENT] = "0"
    found = CapturedKeys.read(captured)
    layers, tokens, kv_heads, head_dim = found.keys.shape
    heads = Heads(found.queries.shape[2], kv_heads, head_dim)
    # A step's other work is shared out among the layers that were captured: a model's are more, and each has less.
    shape = replace(
        shape_named("tiny"),
        layers=layers,
        query_heads=heads.query,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype="bfloat16",
    )
    contestants = on_real_keys([float(share) for share in shares.split(",") if share], numbers(budgets))
    torch.manual_seed(0)
    rows: list[Row] = []
    for case in parse_cases(cases):
        fitting = layers_for(case, shape, int(torch.cuda.mem_get_info()[0] * memory))
        contexts = Contexts(heads, case.context, case.batch, fitting, device, DTYPE, captured=found)
        rows += measured_on(contexts, case, found.model, shape, contestants, [], replays)
        del contexts
        Record(header() | {"captured_tokens": tokens, "captured_layers": layers}, rows).write(output)
        torch.cuda.empty_cache()
    Console(width=150).print(table(rows))


@app.command()
def merge(
    records: Annotated[list[Path], typer.Argument(help="What several runs wrote.")],
    output: Annotated[Path, typer.Option(help="Where to write JSON.")] = RESULTS / "attention.json",
) -> None:
    """Put the rows of several runs into one record."""
    whole = merged([Record.read(path) for path in records])
    whole.write(output)
    Console(width=150).print(table(whole.rows))


def contestants_of(unions: Sequence[int], delta_layers: Sequence[int]) -> list[Contestant]:
    """Return what is timed, with ``tactic`` at ``unions`` percent; ``delta`` only where there are Δ-layers."""
    delta = [Contestant("delta", {"budget": 1024}, {"budget": 1024, "delta_layers": list(delta_layers)})]
    return [
        Contestant("dense", {}, terminations=TERMINATIONS),
        Contestant("streaming_llm", {}, {"sinks": 4, "window": 1024}),
        Contestant("quest", {"budget": 2048, "full_layers": 0}, {"budget": 2048, "full_layers": 0}),
        Contestant("snapkv", {"budget": 1024}, {"budget": 1024}, TERMINATIONS),
        *(delta if delta_layers else []),
        Contestant("quoka", {"budget": 1024}, {"budget": 1024}),
        *(
            Contestant("tactic", {"p": 0.9, "full_layers": 0}, {"union_percent": percent}, TERMINATIONS, percent / 100)
            for percent in unions
        ),
        *(
            Contestant("lowbit_top_p", {"p": 0.9}, {"union_percent": percent}, TERMINATIONS, percent / 100)
            for percent in unions
        ),
        *(
            Contestant("lowbit_top_k", {"budget_ratio": percent / 100}, {"union_percent": percent})
            for percent in unions
        ),
    ]


def on_real_keys(shares: Sequence[float], budgets: Sequence[int]) -> list[Contestant]:
    """Return what is timed on captured keys: the policies that select by codes, as requests ask for them."""
    return [
        *(Contestant("lowbit_top_p", {"p": share}, {"p": share}) for share in shares),
        *(Contestant("lowbit_top_k", {"budget": budget}, {"budget": budget}) for budget in budgets),
    ]


def with_sinks(contestants: Sequence[Contestant], sinks: Sequence[int]) -> list[Contestant]:
    """Return each sparse policy once for each of ``sinks``, told apart by a parameter; all as they are without any."""
    if not sinks:
        return list(contestants)
    return [
        replace(
            contestant,
            decode={**contestant.decode, "sinks": count},
            parameters={**contestant.parameters, "sinks": count},
        )
        for contestant in contestants
        if contestant.name != "dense"
        for count in sinks
    ]


def heads_of(shape: ModelShape) -> Heads:
    """Return the heads of a model's layers."""
    return Heads(shape.query_heads, shape.kv_heads, shape.head_dim)


def layers_for(
    case: Case, shape: ModelShape, available: int, cache_bytes: int = 50 << 20, dtype: torch.dtype = DTYPE
) -> int:
    """Return how many layers are made: enough that small selections of all of them exceed L2, if they fit.

    Args:
        case: what is timed.
        shape: of the model.
        available: bytes for keys and values.
        cache_bytes: of L2.
        dtype: of keys and values.
    """
    token_bytes = 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
    smallest = _SMALLEST_SELECTION * case.batch * token_bytes
    # Of DELTA's layers, those that reuse are all but a few.
    wanted = calls_beyond_cache(smallest, cache_bytes) + 2 * full_reads_of(case.tokens * token_bytes, cache_bytes)
    return min(_MAX_LAYERS, wanted, available // (case.tokens * token_bytes))


def roles_of(layers: int, full_reads: int) -> tuple[range, range, range]:
    """Return which of ``layers`` layers are dense to DELTA, which are Δ-layers, and which reuse; at least one of each.

    Args:
        layers: at least 3.
        full_reads: how many layers it takes that whole contexts in them exceed L2.
    """
    each = max(1, min(full_reads, layers // 3))
    return range(each), range(each, 2 * each), range(2 * each, layers)


def check(
    heads: Heads,
    contestants: Sequence[Contestant],
    length: int,
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> dict[str, float]:
    """Compare every policy with the torch reference in the same dtype; selections may differ where scores nearly tie.

    ``cache_dtype`` is that of keys and values; None for ``dtype``.

    Returns:
        By policy, the relative error of all layers' outputs, and that of the bytes read.
    """
    contexts = Contexts(heads, length, _CHECKED_ROWS, _CHECKED_LAYERS, device, dtype, cache_dtype=cache_dtype)
    errors: dict[str, float] = {}
    for contestant in {contestant.name: contestant for contestant in contestants}.values():
        for termination in contestant.terminations:
            policy = contestant.policy(termination, **_delta_layers(contestant, [1]))
            expected, counted = reference(contexts, policy)
            requests = Requests(contexts, policy, ordered=termination != _NONE)
            outputs = []
            for layer in range(contexts.layers):
                requests.attend(layer)
                outputs.append(requests.output.clone())
            requests.decode.finish()
            of_policy = f"{contestant.name}, termination: {termination}"
            errors[f"{of_policy}: output"] = relative_error(torch.stack(outputs), torch.stack(expected))
            read = [float(s.rows[:, Field.DECODE_READ_BYTES].sum()) for s in (requests.statistics, counted)]
            errors[f"{of_policy}: bytes"] = abs(read[0] / read[1] - 1)
    return errors


def measure(
    case: Case,
    model: str,
    contestants: Sequence[Contestant],
    delta_layers: Sequence[int],
    layers: int,
    replays: int,
    device: torch.device,
    cache_dtype: torch.dtype = DTYPE,
) -> list[Row]:
    """Time the dense decodes, then every policy, then the dense decodes again: their means are the baselines."""
    shape, length = shape_named(model), measured_length(case.context)
    contexts = Contexts(heads_of(shape), length, case.batch, layers, device, DTYPE, cache_dtype=cache_dtype)
    return measured_on(contexts, case, model, shape, contestants, delta_layers, replays)


def measured_on(
    contexts: Contexts,
    case: Case,
    model: str,
    shape: ModelShape,
    contestants: Sequence[Contestant],
    delta_layers: Sequence[int],
    replays: int,
) -> list[Row]:
    """Do what ``measure`` does, on contexts that there are already."""
    cache_bytes = torch.cuda.get_device_properties(contexts.device).L2_cache_size
    timer = Timer(contexts, cache_bytes, replays, kernels=kernel_times)
    before = timer.dense()
    stages: list[tuple[str, dict[str, Any], Stage]] = []
    for contestant in contestants:
        for termination in contestant.terminations:
            labels = {**contestant.parameters, "termination": termination}
            found = stages_of(contestant, termination, timer, shape, delta_layers)
            stages += [(contestant.name, labels, stage) for stage in found]
    after = timer.dense()
    both = {
        name: replace(timing, microseconds=(timing.microseconds + after[name].microseconds) / 2)
        for name, timing in before.items()
    }
    name, baseline = min(both.items(), key=lambda named: named[1].microseconds)
    rows = [
        row_of(
            case, model, "dense", {"backend": each}, Stage("layer", timing, contexts.layer_bytes), baseline, contexts
        )
        for each, timing in both.items()
    ]
    of_all = {"dense_backend": name, "layers": contexts.layers}
    return rows + [
        row_of(case, model, policy, {"backend": "winnow", **parameters, **of_all}, stage, baseline, contexts)
        for policy, parameters, stage in stages
    ]


class Timer:
    """Times calls on ``contexts``, round and round their layers."""

    def __init__(
        self,
        contexts: Contexts,
        cache_bytes: int,
        replays: int,
        time: Callable[[Sequence[Callable[[], None]], int], Timing] = time_calls,
        kernels: Callable[[Sequence[Callable[[], None]]], dict[str, Timing]] = lambda _calls: {},
    ) -> None:
        self.contexts = contexts
        self.kernels = kernels
        self._time = time
        self._cache_bytes = cache_bytes
        self._replays = replays
        self._dense: dict[str, DenseDecode] = {}

    def __call__(
        self, run: Callable[[int, int], None], layers: Sequence[int], read_bytes: float, steps: Sequence[int] = (0,)
    ) -> Timing:
        """Time ``run``, which reads so many bytes in one of ``layers``, in all of ``steps``, again and again."""
        count = calls_beyond_cache(int(read_bytes), self._cache_bytes)
        calls = calls_of(run, layers, steps)
        if len(steps) > 1:
            # Whole rounds: else a step would follow one that is not its neighbour.
            count = -(-count // len(calls)) * len(calls)
        return self._time([calls[i % len(calls)] for i in range(count)], self._replays)

    def dense(self) -> dict[str, Timing]:
        """Time dense decode, by its name."""
        contexts = self.contexts
        if not self._dense:
            step = Requests(contexts, AttentionPolicy(), ordered=True).step
            self._dense = dense_decodes(contexts.queries, contexts.caches, step.batch, contexts.heads.scale)
        layers = range(contexts.layers)
        return {
            name: self(partial(_attend_densely, decode), layers, contexts.layer_bytes)
            for name, decode in self._dense.items()
        }


def calls_of(run: Callable[[int, int], None], layers: Sequence[int], steps: Sequence[int]) -> list[Callable[[], None]]:
    """Return calls of ``run`` for each layer in each step, a step's layers one after another."""
    return [partial(run, layer, step) for step, layer in product(steps, layers)]


def stages_of(
    contestant: Contestant, termination: str, timer: Timer, shape: ModelShape, delta_layers: Sequence[int]
) -> Iterator[Stage]:
    """Time a policy's stages."""
    contexts = timer.contexts
    everywhere = range(contexts.layers)
    full, refresh, reuse = roles_of(contexts.layers, full_reads_of(contexts.layer_bytes))
    own = contestant.policy(termination, **_delta_layers(contestant, refresh))
    requests = Requests(contexts, own, ordered=termination != _NONE)
    found: dict[str, Any] = {}
    if contestant.union is not None:
        found = serve_union(requests, contestant, termination)
    if requests.selects_by_codes:
        found |= misses_of(requests, everywhere)
    step = timer(lambda _layer, _step: requests.once_a_step(), everywhere, 0)
    share = step.microseconds / shape.layers
    yield Stage("step", step, more=found)
    if contestant.name == "delta":
        weights = {"full": min(delta_layers), "refresh": len(delta_layers)}
        weights["reuse"] = shape.layers - sum(weights.values())
        roles = {
            name: _layer_stage(requests, layers, timer, share, {"role": name})
            for name, layers in (("full", full), ("refresh", refresh), ("reuse", reuse))
        }
        yield from roles.values()
        yield averaged(roles, weights)
        return
    whole = _layer_stage(requests, everywhere, timer, share, found)
    yield whole
    counts = requests.counts(everywhere)
    attended = counts[Count.ATTENDED] * 2 * contexts.caches[0].vector_bytes
    yield Stage("attend", timer(requests.attend_alone, everywhere, attended), attended, found)
    if contestant.name not in _NOTHING_TO_SELECT:
        index = max(0.0, counts[Count.READ_BYTES] - attended)
        yield Stage("select", timer(requests.select, everywhere, index, requests.walk), index, found)
    if requests.selects_by_codes and termination == _NONE:
        build = timer(lambda _layer, _step: requests.build(), everywhere, contexts.layers * contexts.layer_bytes)
        per_layer = replace(build, microseconds=build.microseconds / contexts.layers)
        yield Stage("build", per_layer, contexts.layer_bytes / 2, found)
    if contestant.name not in _NOTHING_TO_SELECT:
        yield from kernels_of(requests, timer, found)


def kernels_of(requests: Requests, timer: Timer, more: Mapping[str, Any]) -> Iterator[Stage]:
    """Time each kernel of a layer; say so where they cannot be told apart."""
    try:
        times = timer.kernels(calls_of(requests.attend, range(requests.contexts.layers), requests.walk))
    except RuntimeError as error:
        Console().print(f"[red]no times of kernels: {error}")
        return
    for name, timing in times.items():
        yield Stage(f"{KERNEL}{name}", timing, None, more)


def misses_of(requests: Requests, layers: Sequence[int]) -> dict[str, float]:
    """Return what KV heads read, and how often a selection began at the wrong place, all in percent."""
    counts = requests.counts(layers)
    marked, counted = requests.missed(layers)
    return {
        "read_percent": round(100 * counts[Count.ATTENDED] / counts[Count.CONTEXT], 2),
        "marked_again_percent": round(100 * marked, 2),
        "counted_again_percent": round(100 * counted, 2),
    }


def serve_union(requests: Requests, contestant: Contestant, termination: str) -> dict[str, float]:
    """Serve a policy with the ``p`` with which its KV heads read the wanted share of their contexts.

    Returns:
        The ``p``, and the share read, in percent.
    """
    assert contestant.union is not None
    low, high, p, reached = 0.0, 1.0, 0.0, math.nan
    for _ in range(_HALVINGS):
        p = (low + high) / 2
        requests.serve(contestant.policy(termination, p=p))
        counts = requests.counts([0])
        # Early termination reads less than was selected, but here it never settles.
        reached = counts[Count.ATTENDED] / counts[Count.CONTEXT]
        if abs(reached - contestant.union) <= _UNION_TOLERANCE * contestant.union:
            break
        low, high = (p, high) if reached < contestant.union else (low, p)
    return {"p": round(p, 5), "read_percent": round(100 * reached, 2)}


def averaged(roles: Mapping[str, Stage], weights: Mapping[str, int]) -> Stage:
    """Return DELTA's mean layer: ``weights`` say how many layers of a model have each role."""
    total = sum(weights.values())
    microseconds = sum(roles[name].timing.microseconds * weight for name, weight in weights.items()) / total
    read = sum((roles[name].read_bytes or 0) * weight for name, weight in weights.items()) / total
    spread = max(stage.timing.spread for stage in roles.values())
    return Stage("layer", Timing(microseconds, spread), read, {"mean_of_layers": dict(weights)})


def full_reads_of(layer_bytes: int, cache_bytes: int = 50 << 20) -> int:
    """Return how many layers it takes that whole contexts in them exceed L2."""
    return calls_beyond_cache(layer_bytes, cache_bytes)


def row_of(
    case: Case,
    model: str,
    policy: str,
    parameters: Mapping[str, Any],
    stage: Stage,
    dense: Timing,
    contexts: Contexts,
) -> Row:
    """Return a row; only a whole layer has a speed-up, only what reads a floor."""
    measured = stage.timing.microseconds
    floor = None
    if stage.read_bytes:
        floor = dense.microseconds * stage.read_bytes / contexts.layer_bytes
    own = {"read_bytes": stage.read_bytes, "kv_cache_dtype": contexts.kv_cache_dtype}
    return Row(
        bench=BENCH,
        model=model,
        policy=policy,
        parameters={"stage": stage.name, **parameters, **stage.more, **own},
        context=case.context,
        batch=case.batch,
        dense=dense.microseconds,
        measured=measured,
        unit="µs",
        speedup=dense.microseconds / measured if stage.name == "layer" else None,
        floor_ratio=None if floor is None else floor / measured,
        spread=stage.timing.spread,
    )


def table(rows: Sequence[Row]) -> Table:
    """Return a table of the rows."""
    result = Table(
        "model", "context", "batch", "policy", "stage", "dense µs", "µs", "spread", "times as fast", "of floor"
    )
    for row in rows:
        labels = row.parameters
        details = [f"{labels['read_percent']} %" if "read_percent" in labels else "", labels.get("role", "")]
        if (termination := labels.get("termination", _NONE)) != _NONE:
            details.append(termination)
        if row.policy == "dense":
            details.append(labels["backend"])
        policy = ", ".join(filter(None, (row.policy, *details)))
        result.add_row(
            row.model,
            str(row.context),
            str(row.batch),
            policy,
            labels["stage"],
            "" if row.dense is None else f"{row.dense:.1f}",
            f"{row.measured:.1f}",
            "" if row.spread is None else f"{row.spread:.1%}",
            "" if row.speedup is None else f"{row.speedup:.2f}",
            "" if row.floor_ratio is None else f"{row.floor_ratio:.0%}",
        )
    return result


def _layer_stage(
    requests: Requests, layers: Sequence[int], timer: Timer, share: float, more: Mapping[str, Any]
) -> Stage:
    """Time whole layers; ``share`` are the microseconds that each has of a step's other work."""
    read = requests.counts(layers)[Count.READ_BYTES]
    timing = timer(requests.attend, layers, read, requests.walk)
    return Stage("layer", replace(timing, microseconds=timing.microseconds + share), read, more)


def _delta_layers(contestant: Contestant, layers: Sequence[int]) -> dict[str, Any]:
    """Return what DELTA asks for beside, in the numbering of the layers that are timed."""
    if contestant.name != "delta":
        return {}
    return {"delta_layers": list(layers), "full_layers": min(layers)}


def _chosen(contestants: Sequence[Contestant], names: str) -> list[Contestant]:
    wanted = {name for name in names.split(",") if name} or {contestant.name for contestant in contestants}
    if unknown := wanted - {contestant.name for contestant in contestants}:
        raise typer.BadParameter(
            f"no policy to be timed is called {', '.join(sorted(unknown))}", param_hint="--policies"
        )
    return [contestant for contestant in contestants if contestant.name in wanted]


def _attend_densely(decode: DenseDecode, layer: int, _step: int) -> None:
    decode.call(layer)()


if __name__ == "__main__":
    app()
