"""How many requests run at once with ``release`` and without, and how fast: a model of a named shape over HTTP.

    python -m benchmarks.serving.released_prompts --context 32768 --load 64 --output-tokens 1024

A server with Winnow is sent ``--load`` requests at once, of distinct random prompts: densely, then with each policy.
Where the KV cache has no room for all of them, SGLang lets some wait. Meanwhile the server is asked every tenth of a
second how many requests decode, and how many slots of the cache are taken.

``run at once`` is the most that decoded together. ``held`` is what a request holds of the cache at its end, less than
its tokens by what the answer says was released; ``fit`` as many as the cache has room for, while one more is being
prefilled. Throughput counts output tokens from the first
request sent to the last token: prefill is in it, and the longer answers are, the less of it.
"""

from __future__ import annotations

import shlex
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Self

import httpx
import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from benchmarks.folders import RESULTS
from benchmarks.model_shapes import shape_named, write_model
from benchmarks.records import Record, Row, header_from_outside
from benchmarks.serving.batch_timing import BatchServer, Stream
from benchmarks.serving.serve import (
    DENSE,
    WINNOW,
    Cell,
    Contestant,
    Plan,
    Prompts,
    arguments_of,
    environment_of,
    kinds_asked,
    parse_contestant,
)
from benchmarks.serving.tables import released_markdown
from tests.runtime import runtime_server

BENCH: Final = "released prompts"
_DEFAULT: Final = (
    'snapkv={"decode": {"policy": "snapkv", "budget": 1024}}',
    'snapkv, released={"decode": {"policy": "snapkv", "budget": 1024, "release": true}}',
)
_PERIOD_SECONDS: Final = 0.1
_TIMEOUT_SECONDS: Final = 60
_WARM_UP_TOKENS: Final = 2048
_WARM_UP_ANSWER: Final = 8
_INTERVAL: Final = 32

app = typer.Typer(add_completion=False)
console = Console(width=150)


@dataclass(frozen=True)
class Look:
    """What the server was doing at a moment.

    Attributes:
        seconds: by ``time.perf_counter``.
        running: requests that decode.
        used: slots of the KV cache that requests hold.
    """

    seconds: float
    running: int
    used: int


@dataclass
class Watch:
    """Looks at a server, from a thread of its own, while the block runs. Use it as a context manager.

    Attributes:
        looks: in their order.
    """

    url: str
    looks: list[Look] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        with httpx.Client(base_url=self.url, timeout=_TIMEOUT_SECONDS) as http:
            while not self._done.wait(_PERIOD_SECONDS):
                [load] = http.get("/v1/loads").raise_for_status().json()["loads"]
                self.looks.append(Look(time.perf_counter(), load["num_running_reqs"], load["num_used_tokens"]))


@app.command()
def main(
    model: Annotated[str, typer.Option(help="A name in benchmarks/model_shapes.py.")] = "Llama-3.1-8B",
    context: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 32768,
    load: Annotated[int, typer.Option(min=1, help="Requests sent at once.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer.")] = 1024,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="NAME, or NAME=JSON of the request's attention; snapkv with release and without if none."),
    ] = None,
    dense: Annotated[bool, typer.Option(help="Whether dense requests come first.")] = True,
    chunked_prefill_size: Annotated[int, typer.Option(min=16, help="Of the server.")] = 8192,
    server_arguments: Annotated[str, typer.Option(help="Passed on to the server.")] = "",
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    log_folder: Annotated[Path | None, typer.Option(help="Where the server's log is left.")] = None,
    output: Annotated[Path, typer.Option(help="Where to write JSON, after each policy.")] = RESULTS
    / "released-prompts.json",
) -> None:
    """Measure, print a table, write JSON. Exit with 1 if the server failed."""
    contestants = [parse_contestant(text) for text in policy or _DEFAULT]
    cells = [Cell(context, load)]
    plan = Plan(model, cells, contestants, output_tokens, _INTERVAL, True, seed, chunked_prefill_size)
    shape = shape_named(model)
    environment = {"WINNOW_POLICIES": ",".join(sorted(kinds_asked(contestants)))}
    about = header_from_outside() | {
        "server_arguments": server_arguments,
        "winnow_environment": environment,
        "chunked_prefill_size": chunked_prefill_size,
    }
    prompts = Prompts(shape.vocab_size, seed)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(Path(temporary), model, plan.context_length, shape.delta_layers)
        logs = log_folder or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{WINNOW}.log"
        arguments = [*arguments_of(plan, WINNOW, [WINNOW]), *shlex.split(server_arguments)]
        try:
            with (
                runtime_server(folder, *arguments, log=log, **environment_of(WINNOW, environment)) as runtime,
                BatchServer(runtime.url, load) as server,
            ):
                asked = [*([Contestant(DENSE, None)] if dense else []), *contestants]
                for contestant in asked:
                    for batch in sorted({1, load}):
                        tokens = min(_WARM_UP_TOKENS, context)
                        server.ask(prompts(tokens, batch), _WARM_UP_ANSWER, contestant.policies(batch))
                for contestant in asked:
                    # It is refused while anybody holds a slot.
                    server.empty_cache()
                    own = prompts(context, load)
                    with Watch(runtime.url) as watch:
                        streams = server.ask(own, output_tokens, contestant.policies(load), _INTERVAL)
                    rows.append(row_of(contestant, streams, watch.looks, server.cache_tokens(), plan))
                    Record(about, beside_dense(rows)).write(output)
                server.empty_cache()
        except (RuntimeError, httpx.HTTPError) as error:
            console.print(Text(f"{log.read_text(errors='replace')[-4000:]}\n{error}", style="red"))
            raise typer.Exit(1) from error
    console.print(Markdown(released_markdown(beside_dense(rows))))


def row_of(
    contestant: Contestant, streams: Sequence[Stream], looks: Sequence[Look], cache_tokens: int, plan: Plan
) -> Row:
    """Return how fast a policy's requests were answered, and how many ran at once.

    Args:
        contestant: the policy.
        streams: the answers.
        looks: at the server meanwhile.
        cache_tokens: slots of its KV cache.
        plan: what was asked.

    Raises:
        ValueError: nobody was seen to decode.
    """
    [cell] = plan.cells
    first, last = min(each.sent for each in streams), max(each.arrivals[-1][0] for each in streams)
    inside = [look for look in looks if first <= look.seconds <= last]
    most = max((look.running for look in inside), default=0)
    if not most:
        raise ValueError(f"{contestant.name}: nobody was seen to decode: ask for more output tokens")
    released = statistics.fmean(each.decode.get("released_tokens") or 0 for each in streams)
    held = cell.context + plan.output_tokens - released
    waits = [each.ttft for each in streams]
    parameters: dict[str, Any] = {
        "attention": contestant.policy,
        "output_tokens": plan.output_tokens,
        "run_at_once": most,
        "mean_running": statistics.fmean(look.running for look in inside),
        "held_tokens": held,
        "fit": int((cache_tokens - cell.context) / held),
        "cache_tokens": cache_tokens,
        "most_used_tokens": max(look.used for look in inside),
        "released_tokens": released,
        "retractions": sum(each.retractions for each in streams),
        "ttft": statistics.median(waits),
        "longest_ttft": max(waits),
        "seconds": last - first,
    }
    return Row(
        bench=BENCH,
        model=plan.model,
        policy=contestant.name,
        parameters=parameters,
        context=cell.context,
        batch=cell.batch,
        dense=None,
        measured=sum(each.tokens for each in streams) / (last - first),
        unit="tokens/s",
        speedup=None,
        floor_ratio=None,
    )


def beside_dense(rows: Sequence[Row]) -> list[Row]:
    """Return ``rows`` beside the dense one among them, if there is one."""
    dense = next((row.measured for row in rows if row.policy == DENSE), None)
    if dense is None:
        return list(rows)
    return [Row(**vars(row) | {"dense": dense, "speedup": row.measured / dense}) for row in rows]


if __name__ == "__main__":
    app()
