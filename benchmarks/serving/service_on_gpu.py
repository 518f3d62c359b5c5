"""What the service costs on a machine where SGLang serves a model: the service beside the bare runtime.

    python -m benchmarks.serving.service_on_gpu run --runtime-url http://127.0.0.1:30000 --service-url http://127.0.0.1:8000
    python -m benchmarks.serving.service_on_gpu table

``run`` asks both for the same, by turns, for about a minute, and writes a record: the time to the first token of
requests one after the other, and tokens a second of many streams at once. Prompts are in the runtime's cache and
answers have a set length, so what differs is the service. ``table`` prints the record as Markdown.

It runs wherever the service does, on the same machine as both, and needs no torch. Keys, where they are asked for, are
in ``WINNOW_API_KEY`` and ``WINNOW_RUNTIME_API_KEY``.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer

from benchmarks.folders import RESULTS
from benchmarks.serving.overhead.beside_runtime import Plan, Way, measured_throughput, measured_ttft, prepare
from benchmarks.serving.overhead.beside_table import service_table
from benchmarks.serving.overhead.streams import Incomplete
from winnow_evaluation.machine import surroundings
from winnow_evaluation.writing import write_json

RECORD: Final = RESULTS / "service.json"
_SERVERS: Final = ("fastapi", "uvicorn", "uvloop", "h11")

app = typer.Typer(help="Measure what the service costs beside the runtime.", no_args_is_help=True)


@app.command()
def run(
    runtime_url: Annotated[str, typer.Option(help="Address of the runtime.")] = "http://127.0.0.1:30000",
    service_url: Annotated[str, typer.Option(help="Address of the service in front of it.")] = "http://127.0.0.1:8000",
    output: Annotated[Path, typer.Option(help="Where the record goes.")] = RECORD,
    streams: Annotated[int, typer.Option(min=1, help="Open at once.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Of each of their answers, in the mean.")] = 128,
    prompt_words: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 100,
    ttft_seconds: Annotated[float, typer.Option(min=0, help="How long single requests are measured.")] = 20,
    throughput_seconds: Annotated[float, typer.Option(min=0, help="How long many streams are measured.")] = 45,
) -> None:
    """Measure, and write the record."""
    bare = Way("runtime", runtime_url.rstrip("/"), _authorized("WINNOW_RUNTIME_API_KEY"))
    service = Way("service", service_url.rstrip("/"), _authorized("WINNOW_API_KEY"))
    plan = Plan(streams, tokens, prompt_words, ttft_seconds, throughput_seconds)
    try:
        record = asyncio.run(_measured(bare, service, plan))
    except (Incomplete, httpx.TransportError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    write_json(output, record)
    typer.echo(service_table(output))


@app.command()
def table(record: Annotated[Path, typer.Option(help="What `run` wrote.")] = RECORD) -> None:
    """Print a record as Markdown."""
    typer.echo(service_table(record))


async def _measured(bare: Way, service: Way, plan: Plan) -> dict[str, Any]:
    # Before anything runs, so that the load average is not its own.
    known = header()
    runtime = await prepare(bare, service, plan)
    return {
        "header": known | {"runtime": runtime},
        "plan": asdict(plan),
        "ttft": asdict(await measured_ttft(bare, service, plan)),
        "throughput": asdict(await measured_throughput(bare, service, plan)),
    }


def header() -> dict[str, Any]:
    """Return what a record begins with: date, commit, machine, and the versions that are installed here."""
    return surroundings(*_SERVERS) | {"device": _device()}


def _device() -> str | None:
    """The first GPU's name and its driver's version, as the driver's own tool says; None without one."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    name, _, driver = done.stdout.splitlines()[0].partition(", ")
    return f"{name}, driver {driver}"


def _authorized(variable: str) -> dict[str, str]:
    key = os.environ.get(variable)
    return {"authorization": f"Bearer {key}"} if key else {}


if __name__ == "__main__":
    app()
