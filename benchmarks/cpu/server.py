"""What policies gain on a CPU, over HTTP from running SGLang servers: time to first token, and decoding.

    python -m benchmarks.cpu.server --output cpu-server.json

Servers with Winnow, with SGLang's ``torch_native``, and with attention that does nothing run side by side and are asked
in turn, one request at a time, so that whatever else the machine does slows all of them; one that is not asked sleeps.
``torch_native`` reads a prompt in one chunk: for a later chunk it would compute the whole prompt anew.

Prompts are the evaluation's. A prompt that is not cached gives the time to the first token. Decode steps are those of
answers to a prompt that is cached, first step excluded; ``torch_native``, to which a cached prompt costs as much as a
new one, gives a longer answer to the same prompt instead, which is cut into rounds.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.command_line import numbers
from benchmarks.cpu import server_figures
from benchmarks.cpu.answer_timing import TimedServer, Timing
from benchmarks.cpu.server_figures import DENSE, NATIVE, Kind, Series
from benchmarks.needle_prompt import needle_prompt
from benchmarks.serving.server_plugins import NOOP, NOOP_ATTENTION, python_path
from tests.runtime import runtime_server
from winnow_evaluation.machine import surroundings
from winnow_evaluation.writing import write_json
from winnow_kernels.policies.registry import PARAMETERS

QUOKA_PREFILL: Final = {"prefill": {"policy": "quoka", "budget": 1024}}
POLICIES: Final = tuple(name for name, kind in PARAMETERS["decode"].items() if name != "dense" and not kind.drafts_only)
_MAX_TOKENS: Final = 65_536
_ONE_CHUNK: Final = 32_768
_WARM_UP_TOKENS: Final = 600

console = Console(width=150)


@dataclass
class Collected:
    """Measurements of one contestant, round by round."""

    kind: Kind
    tokens: int
    contestant: str
    seconds: list[float] = field(default_factory=list)
    first_steps: list[float] = field(default_factory=list)
    very_first_step: float | None = None
    attended: list[float] = field(default_factory=list)

    def add(self, timing: Timing) -> None:
        """Add a decode round."""
        self.seconds += timing.tpot()
        self.first_steps.append(timing.first_step)
        if timing.attended_ratio is not None:
            self.attended.append(timing.attended_ratio)

    def series(self) -> Series:
        first_step = median(self.first_steps) if self.first_steps else None
        build = None
        if self.very_first_step is not None and first_step is not None:
            build = max(0.0, self.very_first_step - first_step)
        attended = fmean(self.attended) if self.attended else None
        return Series(self.kind, self.tokens, self.contestant, self.seconds, attended, first_step, build)


@dataclass(frozen=True)
class Plan:
    """What is asked of the servers.

    Attributes:
        prefill: prompt lengths at which the time to the first token is measured.
        prefill_rounds: prompts of each of these lengths.
        decode: prompt lengths at which decoding is measured.
        rounds: answers of each policy to a prompt.
        tokens: in an answer.
        policies: names of decode policies.
    """

    prefill: Sequence[int]
    prefill_rounds: int
    decode: Sequence[int]
    rounds: int
    tokens: int
    policies: Sequence[str]


class Prompts:
    """Prompts of exact lengths, by length and number."""

    def __init__(self, model: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def __call__(self, length: int, number: int) -> list[int]:
        return needle_prompt(self._tokenizer, length, number)[0]


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model to serve.")] = Path("models/needle"),
    prefill: Annotated[str, typer.Option(help="Prompt lengths for the time to the first token.")] = "16384,30000",
    prefill_rounds: Annotated[int, typer.Option(min=1, help="Prompts of each of these lengths.")] = 1,
    decode: Annotated[str, typer.Option(help="Prompt lengths for decoding.")] = "512,2048,8192,30000",
    crossover: Annotated[
        str, typer.Option(help="Prompt lengths for decoding without crossovers.")
    ] = "512,1024,2048,4096,8192,16384",
    rounds: Annotated[int, typer.Option(min=1, help="Answers of each policy to a prompt.")] = 5,
    tokens: Annotated[int, typer.Option(min=3, help="Tokens of an answer.")] = 32,
    policies: Annotated[str, typer.Option(help="Decode policies, with their defaults.")] = ",".join(POLICIES),
    tolerance: Annotated[float, typer.Option(help="How much slower than dense is too slow.")] = 0.03,
    quick: Annotated[bool, typer.Option("--quick", help="Short prompts and answers: does everything run?")] = False,
    output: Annotated[Path | None, typer.Option(help="Where to write JSON, after each length.")] = None,
) -> None:
    """Measure, print tables, write JSON. Exits with 1 if a policy is too slow as the server ships."""
    if quick:
        prefill, decode, crossover = prefill and "2048", decode and "512,2048", crossover and "512,2048"
        prefill_rounds, rounds, tokens = 1, 2, 8
    names = [name for name in policies.split(",") if name]
    record = surroundings() | {"model": model.name, "tokens": tokens, "series": []}
    shipped = Plan(numbers(prefill), prefill_rounds, numbers(decode), rounds, tokens, names)
    without = Plan([], 1, numbers(crossover), rounds, tokens, names)
    for of_length in chain(measure_shipped(model, shipped), measure_crossovers(model, without)):
        record["series"] += [asdict(series) for series in of_length]
        if output:
            write_json(output, record)
    found = server_figures.figures(server_figures.read_series(record))
    print_tables(found)
    too_slow = server_figures.slower_policies(found, tolerance)
    for figure in too_slow:
        where = f"{figure.series.contestant} at {figure.series.tokens:,} tokens"
        console.print(f"Slower than dense by more than {tolerance:.0%}: {where} ({figure.slower_than_dense:+.1%})")
    suggested = server_figures.suggested_crossovers(found, tolerance)
    if suggested:
        console.print(
            "From these lengths on, policies are no slower than dense (each policy's declaration.py):", suggested
        )
    if too_slow:
        raise typer.Exit(1)


def measure_shipped(model: Path, plan: Plan) -> Iterator[list[Series]]:
    """Measure time to first token and decoding with all backends, length by length."""
    if not plan.prefill and not plan.decode:
        return
    prompts = Prompts(model)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        native = stack.enter_context(serve_native(model, folder))
        noop = stack.enter_context(serve_noop(model, folder))
        winnow = stack.enter_context(serve_winnow(model, folder))
        for length in sorted({*plan.prefill, *plan.decode}):
            console.print(f"{length:,} tokens")
            yield _measure_length(plan, length, prompts, winnow, native, noop)


def measure_crossovers(model: Path, plan: Plan) -> Iterator[list[Series]]:
    """Measure decoding where no policy runs dense for the context's length, length by length."""
    if not plan.decode:
        return
    prompts = Prompts(model)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        winnow = stack.enter_context(serve_winnow(model, folder, WINNOW_CROSSOVER_TOKENS="0"))
        for length in sorted(plan.decode):
            console.print(f"{length:,} tokens without crossovers")
            winnow.empty_cache()
            prompt = prompts(length, 0)
            winnow.ask(prompt, 1)
            yield _measure_decode(Kind.CROSSOVER, plan, prompt, winnow, None)


def _measure_length(
    plan: Plan, length: int, prompts: Prompts, winnow: TimedServer, native: TimedServer, noop: TimedServer
) -> list[Series]:
    names = (NATIVE, NOOP, "quoka prefill", DENSE)
    first_tokens = {name: Collected(Kind.TTFT, length, name) for name in names}
    native_steps = Collected(Kind.DECODE, length, NATIVE)
    is_prefill, is_decode = length in plan.prefill, length in plan.decode
    prompt: list[int] = []
    for number in range(plan.prefill_rounds if is_prefill else 1):
        prompt = prompts(length, number)
        # The tokens of a decode measurement: a first token and a first step that belong to no round, then the rounds.
        native_tokens = 2 + plan.rounds * (plan.tokens - 2) if is_decode and number == 0 else 1
        timing = _ask_uncached(native, prompt, native_tokens)
        first_tokens[NATIVE].seconds.append(timing.ttft)
        if native_tokens > 1:
            native_steps.seconds += timing.tpot(plan.rounds)
            native_steps.first_steps.append(timing.first_step)
        first_tokens[NOOP].seconds.append(_ask_uncached(noop, prompt, 1).ttft)
        if is_prefill:
            first_tokens["quoka prefill"].seconds.append(_ask_uncached(winnow, prompt, 1, QUOKA_PREFILL).ttft)
        # Last, so that the cache holds what decoding needs.
        first_tokens[DENSE].seconds.append(_ask_uncached(winnow, prompt, 1).ttft)
    series = [each.series() for each in first_tokens.values()] if is_prefill else []
    if is_decode:
        series += [native_steps.series(), *_measure_decode(Kind.DECODE, plan, prompt, winnow, noop)]
    return series


def _measure_decode(
    kind: Kind, plan: Plan, prompt: list[int], winnow: TimedServer, noop: TimedServer | None
) -> list[Series]:
    """Decode a prompt that the servers have cached, every policy once in each round."""
    contestants = (DENSE, *plan.policies) if noop is None else (DENSE, NOOP, *plan.policies)
    collected = {name: Collected(kind, len(prompt), name) for name in contestants}

    def ask(name: str) -> Timing:
        if name == NOOP and noop is not None:
            timing = noop.ask(prompt, plan.tokens)
        else:
            attention = None if name == DENSE else {"decode": {"policy": name}}
            timing = winnow.ask(prompt, plan.tokens, attention)
        if 2 * timing.cached_tokens < len(prompt):
            raise RuntimeError(
                f"{name}: {timing.cached_tokens} of {len(prompt)} tokens are cached, fewer than expected"
            )
        return timing

    for name in plan.policies:
        collected[name].very_first_step = ask(name).first_step
    for number in range(plan.rounds):
        # Another contestant begins each round: none always follows the same one.
        turn = number % len(contestants)
        for name in contestants[turn:] + contestants[:turn]:
            collected[name].add(ask(name))
    return [each.series() for each in collected.values()]


def _ask_uncached(
    server: TimedServer, prompt: list[int], tokens: int, attention: dict[str, Any] | None = None
) -> Timing:
    server.empty_cache()
    timing = server.ask(prompt, tokens, attention)
    if timing.cached_tokens:
        raise RuntimeError(f"{timing.cached_tokens} tokens of a new prompt were cached")
    return timing


@contextlib.contextmanager
def serve_native(model: Path, folder: Path) -> Iterator[TimedServer]:
    """Serve with ``torch_native``, prompts in one chunk."""
    chunk = ["--chunked-prefill-size", str(_ONE_CHUNK)]
    with _serve(model, folder / "torch_native.log", "torch_native", chunk) as server:
        yield server


@contextlib.contextmanager
def serve_noop(model: Path, folder: Path) -> Iterator[TimedServer]:
    """Serve with attention that does nothing, prompts in the chunks that Winnow's server takes."""
    log = folder / "noop.log"
    with _serve(model, log, "torch_native", [], PYTHONPATH=python_path(NOOP_ATTENTION)) as server:
        NOOP_ATTENTION.check_log(log)
        yield server


@contextlib.contextmanager
def serve_winnow(model: Path, folder: Path, **environment: str) -> Iterator[TimedServer]:
    """Serve with Winnow."""
    with _serve(model, folder / "winnow.log", "winnow", [], **environment) as server:
        for policy in POLICIES:
            server.ask(_warm_up_prompt(), 4, {"decode": {"policy": policy}})
        server.ask(_warm_up_prompt(), 4, QUOKA_PREFILL)
        yield server


@contextlib.contextmanager
def _serve(model: Path, log: Path, backend: str, arguments: list[str], **environment: str) -> Iterator[TimedServer]:
    console.print(f"Starting SGLang with {log.stem}")
    arguments = ["--attention-backend", backend, "--max-total-tokens", str(_MAX_TOKENS), *arguments]
    with runtime_server(model, *arguments, log=log, **environment) as runtime, TimedServer(runtime.url) as server:
        server.ask(_warm_up_prompt(), 8)
        server.ask(_warm_up_prompt(), 8)
        yield server


def _warm_up_prompt() -> list[int]:
    return [10 + place % 90 for place in range(_WARM_UP_TOKENS)]


def print_tables(found: Sequence[server_figures.Figure]) -> None:
    """Print a table of each kind."""
    for kind in Kind:
        rows = [figure for figure in found if figure.series.kind == kind]
        if not rows:
            continue
        table = Table(*server_figures.headings(kind), title=server_figures.TITLES[kind])
        for figure in rows:
            table.add_row(*server_figures.cells(figure))
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
