"""Timing of kernels on a GPU: replays of CUDA graphs over more memory than the L2 cache holds, and their medians."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

# What is read between two reads of the same byte, in sizes of the L2 cache.
_CACHES_BETWEEN_READS: Final = 3
_MIN_CALLS: Final = 4
_MAX_CALLS: Final = 256
_WARM_UPS: Final = 3


@dataclass(frozen=True)
class Timing:
    """How long one call takes.

    Attributes:
        microseconds: the median over replays, each of all calls.
        spread: of the replays, (third quartile − first quartile) ÷ median; a smaller difference is noise.
    """

    microseconds: float
    spread: float


def gpu() -> torch.device:
    """Return the GPU.

    Raises:
        SystemExit: there is none.
    """
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a GPU: torch finds none.")
    return torch.device("cuda")


def calls_beyond_cache(bytes_per_call: int, cache_bytes: int) -> int:
    """Return how many calls, each reading other bytes, a graph needs so that none finds what it reads in L2."""
    needed = -(-_CACHES_BETWEEN_READS * cache_bytes // max(1, bytes_per_call))
    return min(_MAX_CALLS, max(_MIN_CALLS, needed))


def time_calls(calls: Sequence[Callable[[], None]], replays: int = 30) -> Timing:
    """Time ``calls``, launched one after another by one CUDA graph.

    Each call reads buffers of its own (``calls_beyond_cache`` says how many it takes), writes where it likes, and does
    nothing that a graph cannot capture. What a first call compiles or allocates is not timed.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for replay in range(-_WARM_UPS, replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 0:
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return summary(times)


def kernel_times(calls: Sequence[Callable[[], None]]) -> dict[str, Timing]:
    """Return how long each kernel runs that ``calls`` launch, by name, in order.

    Args:
        calls: as of ``time_calls``; all launch the same kernels.

    Raises:
        RuntimeError: they do not, or the profiler may not look.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for call in calls:
            call()
        torch.cuda.synchronize()
    events = [event for event in seen.events() or () if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    return times_by_place([(event.name, event.time_range.elapsed_us()) for event in events], len(calls))


def times_by_place(launches: Sequence[tuple[str, float]], calls: int) -> dict[str, Timing]:
    """Return the times of each kernel of a call; one that comes again is told as ``NAME, 2``.

    Args:
        launches: name and microseconds of each kernel, in order.
        calls: how many have launched them, at least two.

    Raises:
        RuntimeError: the calls do not launch the same kernels, or none are seen.
    """
    if not launches:
        raise RuntimeError("the profiler sees no kernels")
    each = len(launches) // calls
    names = [name for name, _ in launches]
    if len(names) % calls or names != names[:each] * calls:
        raise RuntimeError(f"{calls} calls have not launched the same kernels: {dict(Counter(names))}")
    found: dict[str, Timing] = {}
    for place, name in enumerate(names[:each]):
        number = names[: place + 1].count(name)
        label = name if number == 1 else f"{name}, {number}"
        found[label] = summary([microseconds for _, microseconds in launches[place::each]])
    return found


def summary(microseconds: Sequence[float]) -> Timing:
    """Return median and spread of at least two times."""
    low, median, high = statistics.quantiles(microseconds, n=4, method="inclusive")
    return Timing(median, (high - low) / median)
