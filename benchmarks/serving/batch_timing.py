"""Asking a running SGLang server for a batch of answers at once, and how fast the batch decodes together."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from benchmarks.generate_stream import GenerateClient, meta_of, request_body

_MIN_GAPS: Final = 4
# Behind the moment from which on all requests decode: steps that still wait for what the last of them prepares.
_STEPS_LEFT_OUT: Final = 2


@dataclass(frozen=True)
class Stream:
    """One answer.

    Attributes:
        sent: seconds, on the clock of all streams.
        arrivals: seconds, and how many tokens had come by then; from the first token on.
        cached_tokens: of the prompt, those in the radix cache.
        decode: what the server says of its decode attention; empty if nothing.
        retractions: how often SGLang took back what it had computed, for want of memory; 0 if it says nothing.
    """

    sent: float
    arrivals: Sequence[tuple[float, int]]
    cached_tokens: int
    decode: Mapping[str, Any]
    retractions: int = 0

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.sent

    @property
    def tokens(self) -> int:
        return self.arrivals[-1][1]


@dataclass(frozen=True)
class BatchTiming:
    """How fast a batch was answered. Times are in seconds.

    Attributes:
        ttft: median over requests.
        longest_ttft: of all requests.
        tpot: median over the steps in which all requests decode.
        tpot_spread: of these steps, (third quartile − first quartile) ÷ median.
        mean_tpot: over the same steps; unlike their median it is fair to answers of which several tokens come at once.
        p99_gap: 99th percentile of what a token waits for after the one before, over the same steps; nothing where both
            came together.
        steps: how many these are.
        throughput: output tokens per second, from the first request sent to the last token.
        cached_tokens: of all prompts.
        attended_ratio: of the context's tokens, those attended to in decode; None from a server that does not count.
        kv_read_ratio: bytes read of KV cache and index ÷ bytes that dense attention reads; None likewise.
        batches: how many batches the figures are the medians of.
        ttft_spread: of their ``ttft``, (third quartile − first quartile) ÷ median; None of a single batch.
    """

    ttft: float
    longest_ttft: float
    tpot: float
    tpot_spread: float
    mean_tpot: float
    p99_gap: float
    steps: int
    throughput: float
    cached_tokens: int
    attended_ratio: float | None
    kv_read_ratio: float | None
    batches: int = 1
    ttft_spread: float | None = None


def read_stream(sent: float, events: Iterable[tuple[float, str]]) -> Stream:
    """Read a stream of ``/generate``: seconds, and a line of server-sent events.

    Raises:
        RuntimeError: the server reports an error, or the stream ends before the answer does.
    """
    arrivals: list[tuple[float, int]] = []
    meta: dict[str, Any] = {}
    for seconds, meta in meta_of(events):
        if not arrivals or meta["completion_tokens"] > arrivals[-1][1]:
            arrivals.append((seconds, meta["completion_tokens"]))
    told = meta.get("attention") or {}
    return Stream(sent, arrivals, meta["cached_tokens"], told.get("decode") or {}, told.get("retracted") or 0)


def timing_of(streams: Sequence[Stream]) -> BatchTiming:
    """Return how fast a batch was answered; the first stream is the one whose tokens are watched.

    Raises:
        ValueError: all requests decoded together for too few steps.
    """
    begin = max(stream.arrivals[0][0] for stream in streams)
    end = min(stream.arrivals[-1][0] for stream in streams)
    inside = [arrival for arrival in streams[0].arrivals if begin <= arrival[0] <= end][_STEPS_LEFT_OUT:]
    if len(inside) <= _MIN_GAPS:
        raise ValueError(f"all requests decoded together for {len(inside)} arrivals only: ask for more output tokens")
    # Tokens that came together count as equally long steps.
    gaps = [
        (after - before) / (tokens - tokens_before) for (before, tokens_before), (after, tokens) in pairwise(inside)
    ]
    low, tpot, high = statistics.quantiles(gaps, n=4, method="inclusive")
    together = inside[-1][1] - inside[0][1] - len(gaps)
    between = [*([0.0] * together), *(after - before for (before, _), (after, _) in pairwise(inside))]
    waits = [stream.ttft for stream in streams]
    first_sent = min(stream.sent for stream in streams)
    last = max(stream.arrivals[-1][0] for stream in streams)
    return BatchTiming(
        ttft=statistics.median(waits),
        longest_ttft=max(waits),
        tpot=tpot,
        tpot_spread=(high - low) / tpot,
        mean_tpot=(inside[-1][0] - inside[0][0]) / (inside[-1][1] - inside[0][1]),
        p99_gap=statistics.quantiles(between, n=100, method="inclusive")[-1],
        steps=inside[-1][1] - inside[0][1],
        throughput=sum(stream.tokens for stream in streams) / (last - first_sent),
        cached_tokens=sum(stream.cached_tokens for stream in streams),
        attended_ratio=_mean_ratio(streams, "attended_ratio"),
        kv_read_ratio=_mean_ratio(streams, "kv_read_ratio"),
    )


def median_timing(timings: Sequence[BatchTiming]) -> BatchTiming:
    """Return the median figures of batches of the same size; ``steps`` are those of all, ``cached_tokens`` the most.

    Raises:
        ValueError: there are none.
    """
    if len(timings) == 1:
        return timings[0]
    waits = [timing.ttft for timing in timings]
    low, ttft, high = statistics.quantiles(waits, n=4, method="inclusive")

    def median(name: str) -> float:
        return float(statistics.median(getattr(timing, name) for timing in timings))

    def median_ratio(name: str) -> float | None:
        known = [ratio for timing in timings if (ratio := getattr(timing, name)) is not None]
        return statistics.median(known) if known else None

    return BatchTiming(
        ttft=ttft,
        longest_ttft=median("longest_ttft"),
        tpot=median("tpot"),
        tpot_spread=median("tpot_spread"),
        mean_tpot=median("mean_tpot"),
        p99_gap=median("p99_gap"),
        steps=sum(timing.steps for timing in timings),
        throughput=median("throughput"),
        cached_tokens=max(timing.cached_tokens for timing in timings),
        attended_ratio=median_ratio("attended_ratio"),
        kv_read_ratio=median_ratio("kv_read_ratio"),
        batches=len(timings),
        ttft_spread=(high - low) / ttft,
    )


class BatchServer(GenerateClient):
    """A running server that is asked batches of up to ``most`` requests."""

    def __init__(self, url: str, most: int) -> None:
        super().__init__(url, most)
        self._threads = ThreadPoolExecutor(most)

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()
        super().__exit__(*error)

    def cache_tokens(self) -> int:
        """Return how many tokens the KV cache has room for."""
        answer = self._http.get("/server_info")
        answer.raise_for_status()
        return int(answer.json()["max_total_num_tokens"])

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        policies: Sequence[Mapping[str, Any] | None],
        interval: int = 1,
    ) -> list[Stream]:
        """Stream answers of ``tokens`` tokens to all ``prompts`` at once, each with its own policy.

        Of the first answer every ``interval``-th token is sent as it comes; of the others only every 32nd or so, since
        all advance together: 64 streams of single tokens would measure the servers of HTTP.

        Raises:
            httpx.HTTPError: the server refuses.
            RuntimeError: it fails.
        """
        # Text beforehand: a hundred thousand numbers take a while.
        bodies = [
            json.dumps(
                request_body(prompt, tokens, policy, stream_interval=interval if index == 0 else max(interval, 32))
            )
            for index, (prompt, policy) in enumerate(zip(prompts, policies, strict=True))
        ]
        return list(self._threads.map(self._ask, bodies))

    def _ask(self, body: str) -> Stream:
        return read_stream(time.perf_counter(), self.events(body))


def _mean_ratio(streams: Sequence[Stream], name: str) -> float | None:
    ratios = [stream.decode[name] for stream in streams if stream.decode.get(name) is not None]
    return statistics.fmean(ratios) if len(ratios) == len(streams) else None
