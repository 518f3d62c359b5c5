"""What the service costs, measured in front of a stand-in for the runtime.

    python -m benchmarks.serving.service_overhead

It writes a record, of which ``benchmarks.written_tables`` makes the table in docs/load-tests.md. The stand-in computes
nothing and streams at a set pace (``benchmarks.serving.overhead``): what is measured is the service alone, on one core,
while stand-in and client share another. What a real runtime makes of it is measured on a machine with a GPU.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer

from benchmarks.folders import RESULTS
from benchmarks.serving.overhead import measure
from benchmarks.serving.overhead.process import Pair, cores, started
from benchmarks.serving.overhead.standin import MODEL
from benchmarks.serving.overhead.streams import Target
from benchmarks.serving.overhead.table import markdown
from winnow_evaluation.machine import surroundings
from winnow_evaluation.writing import write_json

# Higher than anything here comes to: what is measured is that they are counted.
_LIMITS: Final = {"requests_per_minute": 1_000_000, "tokens_per_minute": 1_000_000_000, "concurrent_requests": 100_000}

_SERVERS: Final = ("fastapi", "uvicorn", "uvloop", "httpx")


@dataclass(frozen=True)
class Plan:
    """How long and how often to measure. Times are in seconds.

    Attributes:
        streams: open at once, where the cost of chunks is measured, and beside requests.
        interval: from a chunk of a stream to the next.
        seconds: for which the cost of chunks is measured.
        requests: where requests are measured.
        many: streams that are opened at once.
        memory_seconds, warm_up, sample_every: of the memory's measurement.
    """

    streams: int
    interval: float
    seconds: float
    requests: int
    many: int
    memory_seconds: float
    warm_up: float
    sample_every: float


async def limited(pair: Pair) -> Target:
    """Requests with a key that has limits and bounds, for a policy by name."""
    settings = {"name": "benchmark", "scopes": ["infer"], "limits": _LIMITS, "bounds": {"min_p": 0.5}}
    async with httpx.AsyncClient(base_url=pair.service.address, trust_env=False) as client:
        answer = await client.post("/v1/keys", json=settings, headers={"authorization": f"Bearer {pair.admin_key}"})
        answer.raise_for_status()
    return Target(pair.service.address, {"authorization": f"Bearer {answer.json()['key']}"}, {"attention": "balanced"})


def plain(pair: Pair) -> Target:
    """Requests with a key that has neither, and no policy."""
    return Target(pair.service.address, {"authorization": f"Bearer {pair.admin_key}"})


async def measured(plan: Plan) -> dict[str, Any]:
    """Return everything there is to measure, by name."""
    async with started() as pair:
        callers = {"plain": plain(pair), "limited": await limited(pair)}
        service = pair.service
        for target in callers.values():
            await measure.request_cost(service, target, plan.requests)
        found: dict[str, Any] = {
            "request_cost": {
                name: asdict(await measure.request_cost(service, target, plan.requests))
                for name, target in callers.items()
            },
            "chunk_cost": {
                name: asdict(await measure.chunk_cost(service, target, plan.streams, plan.interval, plan.seconds))
                for name, target in callers.items()
            },
            "added_ttft": [
                asdict(await measure.added_ttft(pair, callers["limited"], plan.requests, beside))
                for beside in (0, plan.streams)
            ],
            "many_streams": asdict(await measure.many_streams(service, callers["limited"], plan.many, plan.seconds)),
        }
        found["memory"] = asdict(
            await measure.memory(
                service, callers["limited"], plan.streams, plan.memory_seconds, plan.warm_up, plan.sample_every
            )
        )
        return found


def run(
    output: Annotated[Path, typer.Option(help="Where the record goes.")] = RESULTS / "service-overhead.json",
    streams: Annotated[int, typer.Option(min=1, help="Streams open at once.")] = 64,
    interval: Annotated[float, typer.Option(min=0.001, help="Seconds between the chunks of a stream.")] = 0.02,
    seconds: Annotated[float, typer.Option(min=1, help="How long the cost of chunks is measured.")] = 20,
    requests: Annotated[int, typer.Option(min=20, help="How many requests are measured, one by one.")] = 300,
    many: Annotated[int, typer.Option(min=1, help="Streams that are opened at once.")] = 600,
    memory_minutes: Annotated[float, typer.Option(min=0.1, help="How long memory is watched.")] = 30,
) -> None:
    """Measure, and write the record."""
    memory_seconds = memory_minutes * 60
    plan = Plan(streams, interval, seconds, requests, many, memory_seconds, memory_seconds / 3, memory_seconds / 180)
    own, others = cores()
    header = {
        **surroundings(*_SERVERS),
        "runtime": f"{MODEL}: computes nothing, streams at a set pace",
        "cores": {"service": own, "stand-in and client": others},
    }
    record = {"header": header, "plan": asdict(plan), "measured": asyncio.run(measured(plan))}
    write_json(output, record)
    typer.echo(markdown(record))


if __name__ == "__main__":
    typer.run(run)
