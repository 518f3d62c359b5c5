"""Single measurements of the service in front of the stand-in. Times are in seconds, sizes in bytes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import linear_regression, median
from typing import Final

from benchmarks.serving.overhead.process import Pair, Running
from benchmarks.serving.overhead.standin import Pace
from benchmarks.serving.overhead.streams import Incomplete, Tally, Target, p95, stream

_MINUTE: Final = 60.0
_BEGINNING_SECONDS: Final = 2.0
_LONG: Final = Pace(250, first=0.05, interval=0.02)
_SHORT: Final = Pace(50, first=0.05, interval=0.02)


@dataclass(frozen=True)
class ChunkCost:
    """What passing chunks on costs.

    Attributes:
        streams: open at once.
        chunks_per_second: of all streams.
        microseconds_per_chunk: CPU time of the service by chunks that clients got.
        core_share: of its one core.
    """

    streams: int
    chunks_per_second: float
    microseconds_per_chunk: float
    core_share: float


@dataclass(frozen=True)
class RequestCost:
    """What a request costs apart from its chunks: CPU time of the service by requests with a single chunk."""

    requests: int
    microseconds_per_request: float


@dataclass(frozen=True)
class AddedTtft:
    """What the service adds to the time to the first token.

    Attributes:
        requests: each way, in turn.
        beside: streams that were open in the background.
        direct, through: medians.
        added: their difference.
        direct_p95, through_p95: 95th percentiles.
    """

    requests: int
    beside: int
    direct: float
    through: float
    added: float
    direct_p95: float
    through_p95: float


@dataclass(frozen=True)
class ManyStreams:
    """Many streams at once.

    Attributes:
        open_at_once: by the client, at any one time.
        finished: with every chunk.
        resident_before, resident_most: memory of the service.
        core_share: of its one core, from the first request to the last chunk.
    """

    streams: int
    chunks_each: int
    open_at_once: int
    finished: int
    resident_before: int
    resident_most: int
    core_share: float


@dataclass(frozen=True)
class Memory:
    """Memory of the service over time, under load that stays the same.

    Attributes:
        seconds: of load, warm-up included.
        warm_up: seconds before what was fitted.
        streams: that were served.
        samples: of resident memory, each with the seconds since the load began.
        slope: bytes a minute, by least squares after warm-up.
    """

    seconds: float
    warm_up: float
    streams: int
    samples: Sequence[tuple[float, int]]
    slope: float


async def chunk_cost(service: Running, target: Target, streams: int, interval: float, seconds: float) -> ChunkCost:
    """Measure while all of ``streams`` are open, and none begins or ends."""
    chunks = round((seconds + 2 * _BEGINNING_SECONDS) / interval)
    tally = Tally()
    reading = [
        asyncio.create_task(stream(target, Pace(chunks, first=0.01, interval=interval), tally)) for _ in range(streams)
    ]
    await asyncio.sleep(_BEGINNING_SECONDS)
    if tally.open != streams:
        raise Incomplete(f"{tally.open} of {streams} streams are open: {tally.refusals[:1]}")
    began, cpu, events = time.perf_counter(), service.cpu_seconds(), tally.events
    await asyncio.sleep(seconds)
    elapsed, cpu, events = time.perf_counter() - began, service.cpu_seconds() - cpu, tally.events - events
    if tally.open != streams:
        raise Incomplete(f"only {tally.open} of {streams} streams lasted")
    await asyncio.gather(*reading)
    tally.check(streams)
    return ChunkCost(streams, events / elapsed, cpu / events * 1e6, cpu / elapsed)


async def request_cost(service: Running, target: Target, requests: int) -> RequestCost:
    """Measure requests one after the other."""
    tally = Tally()
    cpu = service.cpu_seconds()
    for _ in range(requests):
        await stream(target, Pace(1, first=0.0, interval=0.0), tally)
    cpu = service.cpu_seconds() - cpu
    tally.check(requests)
    return RequestCost(requests, cpu / requests * 1e6)


async def added_ttft(pair: Pair, target: Target, requests: int, beside: int) -> AddedTtft:
    """Measure requests one after the other, by turns straight to the stand-in and through the service."""
    direct_target = Target(pair.standin.address)
    pace = Pace(1, first=0.02, interval=0.0)
    tally = Tally()
    direct, through = [], []
    async with _background(target, beside):
        for _ in range(requests):
            direct.append(await stream(direct_target, pace, tally))
            through.append(await stream(target, pace, tally))
    tally.check(2 * requests)
    middle, middle_through = median(direct), median(through)
    return AddedTtft(requests, beside, middle, middle_through, middle_through - middle, p95(direct), p95(through))


async def many_streams(service: Running, target: Target, streams: int, seconds: float) -> ManyStreams:
    """Open ``streams`` that last ``seconds`` or longer, each with a chunk a second."""
    chunks = max(2, round(seconds))
    tally = Tally()
    before = most = service.resident_bytes()
    began, cpu = time.perf_counter(), service.cpu_seconds()
    reading = [
        asyncio.create_task(stream(target, Pace(chunks, first=1.0, interval=1.0), tally)) for _ in range(streams)
    ]
    pending: set[asyncio.Task[float]] = set(reading)
    while pending:
        _, pending = await asyncio.wait(pending, timeout=0.5)
        most = max(most, service.resident_bytes())
    share = (service.cpu_seconds() - cpu) / (time.perf_counter() - began)
    # Each has its chunks, what its attention cost, and [DONE].
    whole = tally.finished if tally.events == streams * (chunks + 2) else 0
    return ManyStreams(streams, chunks, tally.most_open, whole, before, most, share)


async def memory(
    service: Running, target: Target, streams: int, seconds: float, warm_up: float, sample_every: float
) -> Memory:
    """Keep ``streams`` short streams open for ``seconds``, new ones in the place of those that end."""
    tally = Tally()
    samples: list[tuple[float, int]] = []
    async with _background(target, streams, tally, _SHORT):
        began = time.perf_counter()
        for number in itertools.count(1):
            await asyncio.sleep(began + number * sample_every - time.perf_counter())
            elapsed = time.perf_counter() - began
            samples.append((round(elapsed, 1), service.resident_bytes()))
            if elapsed >= seconds:
                break
    if tally.broken:
        raise Incomplete(f"{tally.broken} streams broke off: {tally.refusals[:1]}")
    return Memory(seconds, warm_up, tally.finished, samples, growth(samples, warm_up))


def growth(samples: Sequence[tuple[float, int]], warm_up: float) -> float:
    """Return by how many bytes a minute memory grows after ``warm_up``, by least squares.

    Args:
        samples: of memory, each with its time.
    """
    steady = [(at / _MINUTE, size) for at, size in samples if at >= warm_up]
    return linear_regression([at for at, _ in steady], [size for _, size in steady]).slope


@asynccontextmanager
async def _background(
    target: Target, streams: int, tally: Tally | None = None, pace: Pace = _LONG
) -> AsyncIterator[None]:
    stopping = False

    async def again_and_again() -> None:
        while not stopping:
            await stream(target, pace, Tally() if tally is None else tally)

    tasks = [asyncio.create_task(again_and_again()) for _ in range(streams)]
    await asyncio.sleep(_BEGINNING_SECONDS if streams else 0)
    try:
        yield
    finally:
        stopping = True
        await asyncio.gather(*tasks)
