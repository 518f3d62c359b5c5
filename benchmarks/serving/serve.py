"""What policies gain end to end: a model of a named shape with random weights, served over HTTP, beside dense backends.

    python -m benchmarks.serving.serve run --model Llama-3.1-8B --context 32768 --batch 8 \
        --policy 'delta' --policy 'tactic={"decode": {"policy": "tactic", "p": 0.75}}' --output serve-32k-8.json
    python -m benchmarks.serving.serve merge serve-*.json

SGLang is started once for each backend and is given batches of distinct random prompts, all sent at once. TPOT is the
median over the steps in which all requests decode; TTFT the median over requests; throughput counts output tokens from
the first request sent to the last token. What a kernel compiles at its first launch is not in it: short requests of
every policy go before.

On the server with Winnow a batch is first asked densely, then with each policy. Its prompts are in the radix cache by
then, unless ``--fresh-prompts``, so only fresh ones have a TTFT and throughput. A ``--mixed`` policy serves every other
request of its batch.

``dense`` is the faster one, in the same run, of the backends other than Winnow; merging takes it from another run on
the same kind of device where a run has none, and says so. A floor is the time in which weights and the bytes read of KV
cache and index would be read with the bandwidth that dense decode reaches.

The backend ``noop`` is the first other one in the list with attention that does nothing. Its speed-up is the bound of
what any attention can reach; ``part_of_bound`` is a speed-up in relation to it. Peaks of memory are of a batch, and
comparable if all servers get the same ``--max-total-tokens``; what is told as beyond dense leaves the KV cache itself
out. Time to first token:

    python -m benchmarks.serving.serve run --model Qwen3-4B --context 51200,131072 --batch 1 --output-tokens 16 \
        --policy 'quoka prefill={"prefill": {"policy": "quoka", "budget": 1024}}' --backends fa3,noop,winnow \
        --fresh-prompts --repeats 5 --server-arguments '--max-total-tokens 163840' --output ttft-qwen3-4b.json

Random weights give diffuse attention: a policy that reads as much as it needs, such as ``tactic``, reads far more than
with a trained model, and one with a cap reads the cap. The bytes read are in the rows. ``--attending NAME=SHARE``
searches, before each batch, for the ``p`` with which such a policy attends to what it would with a trained model. Where
even the lowest ``p`` reads more, ``--gain`` gives queries larger weights: logits have it as their deviation.

    python -m benchmarks.serving.serve run --context 32768,98304 --gain 3.5 --policy 'lowbit_top_p' \
        --attending lowbit_top_p=0.06 --policy 'lowbit_top_k={"decode": {"policy": "lowbit_top_k", "budget": 512}}'
"""

from __future__ import annotations

import json
import random
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.command_line import numbers
from benchmarks.folders import RESULTS
from benchmarks.model_shapes import ModelShape, shape_named, write_model
from benchmarks.records import Record, Row, header_from_outside, headers_of, merged
from benchmarks.serving.batch_timing import BatchServer, BatchTiming, median_timing, timing_of
from benchmarks.serving.gpu_memory import PeakMemory
from benchmarks.serving.server_plugins import (
    GAIN_SETTING,
    NOOP,
    NOOP_ATTENTION,
    PEAKED_ATTENTION,
    ServerPlugin,
    python_path,
)
from tests.runtime import runtime_server
from winnow_kernels.policies.attention_policy import parse_policy

BENCH: Final = "serve"
WINNOW: Final = "winnow"
DENSE: Final = "dense"
NOOP_BACKEND: Final = "noop"
_WARM_UP_TOKENS: Final = 2048
_WARM_UP_ANSWER: Final = 8
# A chunk of a prompt that has others before and behind it.
_WARM_UP_CHUNKS: Final = 3
_SMALLEST_TOKEN: Final = 10
_HALVINGS: Final = 12
_SOUGHT_ANSWER: Final = 8
_TOLERANCE: Final = 0.02
_SPARE_TOKENS: Final = 16
ROOM_FOR_CHUNKED: Final = 2
# Without Winnow's plugin, SGLang is as others have it; what lets it run on a CPU does nothing on a GPU.
_STOCK: Final = {"SGLANG_PLUGINS": "winnow_cpu"}
_NOT_DENSE: Final = (WINNOW, NOOP_BACKEND)
_OUTPUT: Final = RESULTS / "serve.json"

app = typer.Typer(add_completion=False)
console = Console(width=150)


@dataclass(frozen=True)
class Contestant:
    """A policy under a name.

    Attributes:
        name: in rows.
        policy: as requests ask for it; None for dense.
        mixed: whether every other request is dense.
        watches_dense: whether, of a mixed batch, it is the tokens of a dense request that are watched.
        attending: the share of the context that it is to attend to, for which a ``p`` is searched; None for its own.
    """

    name: str
    policy: Mapping[str, Any] | None
    mixed: bool = False
    watches_dense: bool = False
    attending: float | None = None

    def with_share(self, p: float) -> Contestant:
        """Return it with another ``p``."""
        assert self.policy is not None
        return replace(self, policy={**self.policy, "decode": {**self.policy["decode"], "p": p}})

    def policies(self, batch: int) -> list[Mapping[str, Any] | None]:
        """Return the policy of each request: the first's tokens are watched."""
        dense = 0 if self.watches_dense else 1
        return [None if self.mixed and index % 2 == dense else self.policy for index in range(batch)]


@dataclass(frozen=True)
class Cell:
    """``batch`` prompts of ``context`` tokens each."""

    context: int
    batch: int


@dataclass(frozen=True)
class Measured:
    """One batch, or the median of several.

    Attributes:
        backend: of the server.
        cell: which prompts.
        contestant: which policy.
        output_tokens: of each answer.
        timing: how fast.
        cache_tokens: that the server's KV cache has room for.
        peak_memory_bytes: in use on the GPU; None where nothing told.
    """

    backend: str
    cell: Cell
    contestant: Contestant
    output_tokens: int
    timing: BatchTiming
    cache_tokens: int
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class Plan:
    """What is asked of every server.

    Attributes:
        model: name of the shape.
        cells: in this order.
        contestants: on the server with Winnow, after dense.
        output_tokens: of each answer.
        interval: every how many tokens the stream that is watched sends some.
        fresh: whether no prompt is asked twice.
        seed: of the prompts.
        chunk: most tokens of a prompt in one forward pass.
        repeats: batches of each cell and contestant; more than one only of fresh prompts.
        repeat_seconds: after as many, the batch that is being answered is the last one of its kind.
        winnow_dense_up_to: longest context that the server with Winnow is asked about densely.
    """

    model: str
    cells: Sequence[Cell]
    contestants: Sequence[Contestant]
    output_tokens: int
    interval: int
    fresh: bool
    seed: int
    chunk: int = 8192
    repeats: int = 1
    repeat_seconds: float = 20
    winnow_dense_up_to: int | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max((cell.context for cell in self.cells), default=0) + self.output_tokens

    @property
    def context_length(self) -> int:
        """Tokens of the longest context of the model: SGLang keeps some to itself."""
        return self.longest + _SPARE_TOKENS

    @property
    def largest_batch(self) -> int:
        return max(cell.batch for cell in self.cells)


@app.command()
def run(
    model: Annotated[str, typer.Option(help="A name in benchmarks/model_shapes.py.")] = "Llama-3.1-8B",
    context: Annotated[str, typer.Option(help="Tokens of a prompt, with commas between.")] = "32768",
    batch: Annotated[str, typer.Option(help="Requests at once, with commas between.")] = "8",
    output_tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer.")] = 128,
    policy: Annotated[
        list[str] | None, typer.Option(help="NAME, or NAME=JSON of the request's attention; may be repeated.")
    ] = None,
    mixed: Annotated[
        list[str] | None,
        typer.Option(help="The same, for every other request of a batch; the others are dense. Both are timed."),
    ] = None,
    attending: Annotated[
        list[str] | None,
        typer.Option(help="NAME=SHARE of the context that a policy with p is to attend to; may be repeated."),
    ] = None,
    backends: Annotated[str, typer.Option(help="SGLang's, and noop, in this order.")] = "fa3,flashinfer,winnow",
    chunked_prefill_size: Annotated[int, typer.Option(min=16, help="Of every server.")] = 8192,
    server_arguments: Annotated[str, typer.Option(help="Passed on to every server.")] = "",
    winnow_arguments: Annotated[str, typer.Option(help="Passed on to the server with Winnow alone.")] = "",
    winnow_environment: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the server with Winnow; may be repeated.")
    ] = None,
    gain: Annotated[
        float | None,
        typer.Option(min=0, help="Of queries: deviation of their logits. SGLang's own random weights attend evenly."),
    ] = None,
    delta_layers: Annotated[str, typer.Option(help="Of the model's profile; its shape's if empty.")] = "",
    interval: Annotated[int, typer.Option(min=1, help="Every how many tokens the watched stream sends some.")] = 1,
    fresh_prompts: Annotated[bool, typer.Option("--fresh-prompts", help="Ask no prompt twice.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Batches of fresh prompts; figures are medians.")] = 1,
    repeat_seconds: Annotated[float, typer.Option(help="No further repeat after as many.")] = 20,
    winnow_dense_up_to: Annotated[
        int | None, typer.Option(help="Longest context to be asked about densely on the server with Winnow.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    log_folder: Annotated[Path | None, typer.Option(help="Where the servers' logs are left.")] = None,
    output: Annotated[Path, typer.Option(help="Where to write JSON, after each batch.")] = _OUTPUT,
) -> None:
    """Measure, print a table, write JSON."""
    if repeats > 1 and not fresh_prompts:
        raise typer.BadParameter(
            "a prompt that is asked again is cached: needs --fresh-prompts", param_hint="--repeats"
        )
    shape = shape_named(model)
    contestants = [parse_contestant(text) for text in policy or []]
    contestants += [half for text in mixed or [] for half in halves_of(parse_contestant(text))]
    contestants = with_attending(contestants, attending or [])
    cells = [Cell(tokens, requests) for tokens in numbers(context) for requests in numbers(batch)]
    plan = Plan(
        model,
        cells,
        contestants,
        output_tokens,
        interval,
        fresh_prompts,
        seed,
        chunked_prefill_size,
        repeats,
        repeat_seconds,
        winnow_dense_up_to,
    )
    layers = tuple(numbers(delta_layers)) or shape.delta_layers
    environment = dict(pair_of(text, "--winnow-environment") for text in winnow_environment or [])
    environment.setdefault("WINNOW_POLICIES", ",".join(sorted(kinds_asked(contestants))))
    about = header_from_outside() | {
        "server_arguments": server_arguments,
        "winnow_arguments": winnow_arguments,
        "winnow_environment": environment,
        "gain": gain,
        "delta_layers": layers,
        "fresh_prompts": fresh_prompts,
        "chunked_prefill_size": chunked_prefill_size,
    }
    names = [name for name in backends.split(",") if name]
    arguments = {name: [*arguments_of(plan, name, names), *shlex.split(server_arguments)] for name in names}
    if WINNOW in arguments:
        arguments[WINNOW] += shlex.split(winnow_arguments)
    found: list[Measured] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(Path(temporary), model, plan.context_length, layers)
        logs = log_folder or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        for backend in names:
            own = environment_of(backend, environment, gain)
            try:
                for measured in serve_and_measure(folder, backend, plan, arguments[backend], logs, own, failures):
                    console.print(progress(measured))
                    found.append(measured)
                    Record(about | {"failures": failures}, rows_of(found, plan.model)).write(output)
            except (RuntimeError, httpx.HTTPError) as error:
                failures.append(f"{backend}: {error}")
                console.print(Text(failures[-1], style="red"))
            Record(about | {"failures": failures}, rows_of(found, plan.model)).write(output)
    console.print(table(rows_of(found, plan.model)))
    if failures:
        raise typer.Exit(1)


@app.command()
def merge(
    records: Annotated[list[Path], typer.Argument(help="What several runs wrote.")],
    output: Annotated[Path, typer.Option(help="Where to write JSON.")] = _OUTPUT,
) -> None:
    """Put several runs into one record; rows without a dense backend in their run get one of another run."""
    whole = with_borrowed_baselines(merged([Record.read(path) for path in records]))
    whole.write(output)
    console.print(table(whole.rows))


def parse_contestant(text: str) -> Contestant:
    """Read ``NAME``, a decode policy with its defaults, or ``NAME=JSON``.

    Raises:
        typer.BadParameter: it is no policy.
    """
    name, _, policy = text.partition("=")
    try:
        asked = json.loads(policy) if policy else {"decode": {"policy": name}}
        parse_policy(asked)
    except ValueError as error:
        raise typer.BadParameter(f"{text}: {error}", param_hint="--policy") from error
    return Contestant(name, asked)


def halves_of(contestant: Contestant) -> list[Contestant]:
    """Return it for every other request of a batch: once its own tokens are watched, once those of a dense request."""
    name = contestant.name
    return [
        replace(contestant, name=f"half {name}, half dense", mixed=True),
        replace(contestant, name=f"dense beside half {name}", mixed=True, watches_dense=True),
    ]


def with_attending(contestants: Sequence[Contestant], asked: Sequence[str]) -> list[Contestant]:
    """Return the contestants, those in ``asked``, NAME=SHARE, with the share of the context to be attended to.

    Raises:
        typer.BadParameter: a name is none of theirs, its policy has no ``p``, or a share is not between 0 and 1.
    """
    found = {contestant.name: contestant for contestant in contestants}
    for text in asked:
        name, share = pair_of(text, "--attending")
        if name not in found:
            raise typer.BadParameter(f"{name}: must be one of {', '.join(found)}", param_hint="--attending")
        policy = parse_policy(found[name].policy or {})
        if not hasattr(policy.decode, "p"):
            raise typer.BadParameter(f"{name}: {policy.decode.policy} has no p", param_hint="--attending")
        if not share.replace(".", "", 1).isdecimal() or not 0 < float(share) < 1:
            raise typer.BadParameter(
                f"{name}: must be a number between 0 and 1; it is {share}", param_hint="--attending"
            )
        found[name] = replace(found[name], attending=float(share))
    return list(found.values())


def kinds_asked(contestants: Sequence[Contestant]) -> set[str]:
    """Return the decode policies that a server needs."""
    asked = [parse_policy(contestant.policy) for contestant in contestants if contestant.policy is not None]
    names: set[str] = {policy.decode.policy for policy in asked}
    return names - {DENSE}


def environment_of(backend: str, of_winnow: Mapping[str, str], gain: float | None = None) -> Mapping[str, str]:
    """Return a server's environment, beside that of this process; ``gain`` is that of its queries, if they get one."""
    environment = dict(of_winnow if backend == WINNOW else _STOCK)
    if gain is not None:
        environment[GAIN_SETTING] = str(gain)
    plugins = _plugins_of(backend, environment)
    if plugins:
        environment["PYTHONPATH"] = python_path(*plugins)
        if backend != WINNOW:
            environment["SGLANG_PLUGINS"] = ",".join([_STOCK["SGLANG_PLUGINS"], *(plugin.name for plugin in plugins)])
    return environment


def _plugins_of(backend: str, environment: Mapping[str, str]) -> list[ServerPlugin]:
    """Return the plugins of the benchmark's own that a server uses."""
    used = [NOOP_ATTENTION] if backend == NOOP_BACKEND else []
    return [*used, PEAKED_ATTENTION] if GAIN_SETTING in environment else used


def arguments_of(plan: Plan, backend: str, backends: Sequence[str]) -> list[str]:
    """Return the arguments of one of the servers.

    Raises:
        typer.BadParameter: there is no backend whose place ``noop`` could take.
    """
    name = backend
    if backend == NOOP_BACKEND:
        name = next((other for other in backends if other not in _NOT_DENSE), "")
        if not name:
            raise typer.BadParameter("noop needs a backend of SGLang's beside it", param_hint="--backends")
    batch = plan.largest_batch
    # SGLang counts a prompt that is prefilled in chunks twice: with no room to spare the last one would wait.
    running = batch + ROOM_FOR_CHUNKED
    return [
        *("--attention-backend", name),
        *("--load-format", "dummy", "--skip-tokenizer-init", "--incremental-streaming-output"),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--context-length", str(plan.context_length)),
        *("--chunked-prefill-size", str(plan.chunk)),
        *("--max-running-requests", str(running), "--cuda-graph-max-bs", str(batch)),
    ]


def serve_and_measure(
    model: Path,
    backend: str,
    plan: Plan,
    arguments: Sequence[str],
    logs: Path,
    environment: Mapping[str, str],
    failures: list[str],
) -> Iterator[Measured]:
    """Start a server, and ask it for every cell; ``failures`` as in ``measure``.

    Raises:
        RuntimeError: it does not start, or fails.
        httpx.HTTPError: it refuses.
    """
    console.print(f"Starting SGLang with {backend}")
    log = logs / f"{backend}.log"
    with (
        runtime_server(model, *arguments, log=log, **environment) as runtime,
        BatchServer(runtime.url, plan.largest_batch) as server,
    ):
        try:
            for plugin in _plugins_of(backend, environment):
                plugin.check_log(log)
            yield from measure(server, backend, plan, shape_named(plan.model), failures)
        except (RuntimeError, httpx.HTTPError):
            console.print(Text(log.read_text(errors="replace")[-4000:]))
            raise


def measure(
    server: BatchServer, backend: str, plan: Plan, shape: ModelShape, failures: list[str]
) -> Iterator[Measured]:
    """Ask a server for every cell: densely, and with all policies if it is Winnow's.

    Batches that did not decode together for long enough are told in ``failures``.
    """
    prompts = Prompts(shape.vocab_size, plan.seed)
    dense = Contestant(NOOP if backend == NOOP_BACKEND else DENSE, None)
    contestants = [dense, *plan.contestants] if backend == WINNOW else [dense]
    for contestant in contestants:
        for batch in sorted({1, plan.largest_batch}):
            tokens = min(_warm_up_tokens(plan, contestant, batch), plan.longest - _WARM_UP_ANSWER)
            server.ask(prompts(tokens, batch), _WARM_UP_ANSWER, contestant.policies(batch))
    cache_tokens = server.cache_tokens()
    for cell in plan.cells:
        asked: list[list[int]] | None = None
        for contestant in contestants:
            if backend == WINNOW and contestant is dense and _is_too_long(cell, plan):
                continue
            if plan.fresh:
                asked = None
            timed = contestant
            if contestant.attending is not None:
                one = asked[:1] if asked else prompts(cell.context, 1)
                timed = sought(server, contestant, contestant.attending, one)
            timings: list[BatchTiming] = []
            began = time.monotonic()
            with PeakMemory() as memory:
                while len(timings) < plan.repeats:
                    if asked is None or timings:
                        server.empty_cache()
                        asked = prompts(cell.context, cell.batch)
                    streams = server.ask(asked, plan.output_tokens, timed.policies(cell.batch), plan.interval)
                    try:
                        timings.append(timing_of(streams))
                    except ValueError as error:
                        failures.append(f"{backend}, {cell.context:,} × {cell.batch}, {contestant.name}: {error}")
                        console.print(Text(failures[-1], style="red"))
                        break
                    if time.monotonic() - began >= plan.repeat_seconds:
                        break
            if timings:
                timing = median_timing(timings)
                yield Measured(backend, cell, timed, plan.output_tokens, timing, cache_tokens, memory.bytes)


def sought(
    server: BatchServer, contestant: Contestant, attending: float, prompts: Sequence[Sequence[int]]
) -> Contestant:
    """Return the contestant with the ``p`` with which it attends to the share ``attending`` of a context.

    Args:
        server: which is asked for short answers.
        contestant: whose ``p`` is searched for.
        attending: between 0 and 1; what it is after as many halvings is as near as it comes.
        prompts: a single one.

    Raises:
        RuntimeError: the server does not say what is attended to.
    """
    low, high = 0.0, 1.0
    found = contestant
    for _ in range(_HALVINGS):
        p = (low + high) / 2
        found = contestant.with_share(p)
        [stream] = server.ask(prompts, _SOUGHT_ANSWER, found.policies(1))
        reached = stream.decode.get("attended_ratio")
        if reached is None:
            raise RuntimeError(f"{contestant.name}: the server does not say what is attended to")
        if abs(reached - attending) <= _TOLERANCE * attending:
            break
        low, high = (p, high) if reached < attending else (low, p)
    return found


def _is_too_long(cell: Cell, plan: Plan) -> bool:
    return plan.winnow_dense_up_to is not None and cell.context > plan.winnow_dense_up_to


def _warm_up_tokens(plan: Plan, contestant: Contestant, batch: int) -> int:
    # A decode policy has nothing of its own in prefill.
    in_prefill = contestant.policy is None or "prefill" in contestant.policy
    return _WARM_UP_CHUNKS * plan.chunk if in_prefill and batch == 1 else _WARM_UP_TOKENS


class Prompts:
    """Random prompts, no two of which begin alike."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def __call__(self, tokens: int, batch: int) -> list[list[int]]:
        ids = range(_SMALLEST_TOKEN, self._vocab_size)
        return [self._random.choices(ids, k=tokens) for _ in range(batch)]


def rows_of(found: Sequence[Measured], model: str) -> list[Row]:
    """Return the rows of a run, each beside the fastest dense backend of its cell."""
    rows = [row for measured in found for row in _rows(measured, model)]
    return [_against(row, rows) for row in rows]


def with_borrowed_baselines(record: Record) -> Record:
    """Give rows that have no dense backend in their run those of other runs on the same kind of device."""
    devices = [one.get("device") for one in headers_of(record)]

    def alike(row: Row) -> list[Row]:
        device = devices[row.parameters["run"]]
        return [other for other in record.rows if other.bench == BENCH and devices[other.parameters["run"]] == device]

    rows = []
    for row in record.rows:
        if row.bench != BENCH or row.dense is not None:
            rows.append(row)
            continue
        found = _against(row, alike(row))
        borrowed = found.parameters | {"dense_of_another_run": True}
        rows.append(row if found.dense is None else replace(found, parameters=borrowed))
    return Record(record.header, rows)


def progress(measured: Measured) -> str:
    """Return a line about a batch."""
    cell, timing = measured.cell, measured.timing
    return (
        f"{measured.backend}, {cell.context:,} × {cell.batch}, {measured.contestant.name}: "
        f"TTFT {timing.ttft:.3f} s, TPOT {timing.tpot * 1e3:.2f} ms, {timing.mean_tpot * 1e3:.2f} on average, "
        f"p99 {timing.p99_gap * 1e3:.2f}, "
        f"over {timing.steps} steps, "
        f"{timing.throughput:.0f} tokens/s, {timing.cached_tokens} tokens cached, {timing.batches} batches"
    )


def table(rows: Sequence[Row]) -> Table:
    """Return a table of the rows."""
    headings = ("model", "context", "batch", "backend", "policy", "figure", "unit", "dense", "", "spread")
    result = Table(*headings, "times as fast", "of bound", "of floor", "KV read")
    for row in rows:
        parameters = row.parameters
        read = parameters.get("kv_read_ratio")
        result.add_row(
            row.model,
            str(row.context),
            str(row.batch),
            parameters["backend"],
            row.policy,
            parameters["figure"],
            row.unit,
            "" if row.dense is None else f"{row.dense:.2f}",
            f"{row.measured:.2f}",
            "" if row.spread is None else f"{row.spread:.1%}",
            "" if row.speedup is None else f"{row.speedup:.2f}",
            "" if parameters.get("part_of_bound") is None else f"{parameters['part_of_bound']:.0%}",
            "" if row.floor_ratio is None else f"{row.floor_ratio:.0%}",
            "" if read is None else f"{read:.1%}",
        )
    return result


def _rows(measured: Measured, model: str) -> Iterator[Row]:
    """Yield a batch's figures, which are beside nothing yet."""
    timing, contestant = measured.timing, measured.contestant
    shape = shape_named(model)
    kv_read_ratio = 0.0 if measured.backend == NOOP_BACKEND else timing.kv_read_ratio
    parameters = {
        "backend": measured.backend,
        "attention": contestant.policy,
        "output_tokens": measured.output_tokens,
        "cached_tokens": timing.cached_tokens,
        "attended_ratio": timing.attended_ratio,
        "kv_read_ratio": kv_read_ratio,
        "read_share": read_share(shape, measured.cell, measured.output_tokens, kv_read_ratio),
        "batches": timing.batches,
        "peak_memory_bytes": measured.peak_memory_bytes,
        "cache_bytes": measured.cache_tokens * shape.layers * shape.token_bytes,
    }
    figures: list[tuple[str, float, str, float | None]] = [
        ("tpot", timing.tpot * 1e3, "ms", timing.tpot_spread),
        ("mean tpot", timing.mean_tpot * 1e3, "ms", None),
        ("p99 between tokens", timing.p99_gap * 1e3, "ms", None),
    ]
    # Pages that happen to be cached are of no account; a prompt asked before is cached but for its last page.
    if 2 * timing.cached_tokens < measured.cell.context * measured.cell.batch:
        figures = [
            ("ttft", timing.ttft * 1e3, "ms", timing.ttft_spread),
            ("longest ttft", timing.longest_ttft * 1e3, "ms", None),
            *figures,
            ("throughput", timing.throughput, "tokens/s", None),
        ]
    for figure, value, unit, spread in figures:
        yield Row(
            bench=BENCH,
            model=model,
            policy=contestant.name,
            parameters={"figure": figure, **parameters},
            context=measured.cell.context,
            batch=measured.cell.batch,
            dense=None,
            measured=value,
            unit=unit,
            speedup=None,
            floor_ratio=None,
            spread=spread,
        )


def read_share(shape: ModelShape, cell: Cell, output_tokens: int, kv_read_ratio: float | None) -> float:
    """Return what a decode step must read, relative to a dense one: weights, and this share of the KV cache."""
    tokens = cell.batch * (cell.context + output_tokens / 2)
    cache = tokens * shape.layers * shape.token_bytes
    ratio = 1.0 if kv_read_ratio is None else kv_read_ratio
    return (shape.weight_bytes + ratio * cache) / (shape.weight_bytes + cache)


def _is_beside(other: Row, row: Row) -> bool:
    """Return whether ``other`` is the same figure for the batch of ``row``."""
    names = ("figure", "output_tokens")
    return (other.model, other.context, other.batch) == (row.model, row.context, row.batch) and all(
        other.parameters[name] == row.parameters[name] for name in names
    )


def _against(row: Row, rows: Sequence[Row]) -> Row:
    """Return the row beside the best dense one of ``rows``, and beside the bound; unchanged if there are none."""
    beside = [other for other in rows if _is_beside(other, row)]
    baselines = [other for other in beside if other.parameters["backend"] not in _NOT_DENSE]
    if not baselines:
        return row
    rates = row.unit == "tokens/s"
    best = max if rates else min
    baseline = best(baselines, key=lambda other: other.measured)
    dense = baseline.measured
    speedup = row.measured / dense if rates else dense / row.measured
    floor = row.parameters["read_share"] * speedup if row.parameters["figure"] == "tpot" else None
    parameters = dict(row.parameters)
    if row.parameters["backend"] == WINNOW:
        bounds = [other.measured for other in beside if other.parameters["backend"] == NOOP_BACKEND]
        if bounds:
            parameters["part_of_bound"] = row.measured / best(bounds) if rates else best(bounds) / row.measured
        beyond = (_beside_the_cache(row), _beside_the_cache(baseline))
        if beyond[0] is not None and beyond[1] is not None:
            parameters["memory_beyond_dense_bytes"] = beyond[0] - beyond[1]
    return replace(row, dense=dense, speedup=speedup, floor_ratio=floor, parameters=parameters)


def _beside_the_cache(row: Row) -> int | None:
    """Return the bytes of memory that are not the KV cache's."""
    peak, cache = row.parameters.get("peak_memory_bytes"), row.parameters.get("cache_bytes")
    return None if peak is None or cache is None else peak - cache


def pair_of(text: str, option: str) -> tuple[str, str]:
    """Read ``NAME=VALUE``.

    Raises:
        typer.BadParameter: it is something else.
    """
    name, separator, value = text.partition("=")
    if not separator:
        raise typer.BadParameter(f"must be NAME=VALUE; it is {text}", param_hint=option)
    return name, value


if __name__ == "__main__":
    app()
