"""The service beside the bare runtime behind it: the same requests, by turns. Times are in seconds."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import httpx

from benchmarks.serving.overhead.streams import Incomplete, Tally, p95, read, request_bytes

_ROUTE: Final = "/v1/completions"
_CPU_METRIC: Final = "winnow_process_cpu_seconds_total "
_TIMEOUT_SECONDS: Final = 120.0
_RESAMPLES: Final = 1000
_REQUESTS_OF_STREAM: Final = 4
_MIN_PAIRS: Final = 20
_MIN_ROUNDS: Final = 2


class NotComparable(Incomplete):
    """The two ways do not lead to the same answers. The message says what differs."""


@dataclass(frozen=True)
class Way:
    """Straight to the runtime, or through the service.

    Attributes:
        headers: of each request.
    """

    name: str
    address: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        streams: open at once, where throughput is measured.
        tokens: of each of their answers, in the mean.
        prompt_words: of each prompt.
        ttft_seconds, throughput_seconds: how long each is measured.
    """

    streams: int
    tokens: int
    prompt_words: int
    ttft_seconds: float
    throughput_seconds: float

    @property
    def requests(self) -> int:
        """Of a round: some for each stream, so that few of them begin at one time."""
        return _REQUESTS_OF_STREAM * self.streams

    def tokens_of(self, number: int) -> int:
        """Return how many tokens the answer to a round's request has: half to one and a half times the mean."""
        return max(1, random.Random(number).randint(self.tokens // 2, self.tokens * 3 // 2))

    def body(self, number: int, tokens: int) -> dict[str, Any]:
        """Return a request for an answer of exactly ``tokens``, the same each time."""
        words = " ".join(f"word{(number + 7 * place) % 997}" for place in range(self.prompt_words))
        return {
            "prompt": f"{number}. {words}",
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }


@dataclass(frozen=True)
class Ttft:
    """Time to the first token of requests one after the other, by turns each way, with their prompts in the cache.

    Attributes:
        pairs: of a request each way.
        bare, service: medians.
        added: their difference.
        added_low, added_high: bounds of its 95 % interval, by resampling pairs.
        bare_p95, service_p95: 95th percentiles.
    """

    pairs: int
    bare: float
    service: float
    added: float
    added_low: float
    added_high: float
    bare_p95: float
    service_p95: float


@dataclass(frozen=True)
class Throughput:
    """Rounds of the same requests, by turns each way: when one has its answer the next is sent.

    Attributes:
        streams: open at once.
        requests, tokens: of each round.
        bare, service: tokens a second of each round.
        lost: share of the bare runtime's tokens a second that the service costs, over all rounds.
        bare_ttft, service_ttft: medians over streams.
        cpu_per_token: CPU time of the service's process; None if its metrics are not public.
    """

    streams: int
    requests: int
    tokens: int
    bare: Sequence[float]
    service: Sequence[float]
    lost: float
    bare_ttft: float
    service_ttft: float
    cpu_per_token: float | None


async def prepare(bare: Way, service: Way, plan: Plan) -> dict[str, Any]:
    """Check that both ways lead to one model, and bring all prompts into its cache.

    Returns:
        What the runtime tells of itself.

    Raises:
        NotComparable: they do not, or answers have another length than is asked for.
    """
    async with httpx.AsyncClient(timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
        models = [await _model(client, way) for way in (bare, service)]
        if models[0] != models[1]:
            raise NotComparable(f"the runtime serves {models[0]}, the service {models[1]}")
        for way in (bare, service):
            tokens = await _reported_tokens(client, way, plan)
            if tokens != plan.tokens:
                raise NotComparable(f"{way.name}: an answer of {plan.tokens} tokens was asked for, and had {tokens}")
        answer = await client.get(f"{bare.address}/server_info", headers=bare.headers)
        known = answer.json() if answer.status_code == httpx.codes.OK else {}
    await _round(service, plan)
    facts = ("version", "attention_backend", "dtype", "kv_cache_dtype", "tp_size", "stream_interval")
    return {"model": models[0], **{name: known[name] for name in facts if known.get(name) is not None}}


async def measured_ttft(bare: Way, service: Way, plan: Plan) -> Ttft:
    """Measure requests one after the other, for ``plan.ttft_seconds``."""
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + plan.ttft_seconds
    while time.perf_counter() < end or len(pairs) < _MIN_PAIRS:
        found = {}
        for way in _in_turn(bare, service, len(pairs)):
            tally = Tally()
            request = request_bytes(way.address, _ROUTE, way.headers, plan.body(0, tokens=1))
            found[way.name] = await read(way.address, request, tally)
            tally.check(1, way.name)
        pairs.append((found[bare.name], found[service.name]))
    low, high = _interval(pairs)
    bares, services = zip(*pairs, strict=True)
    return Ttft(len(pairs), median(bares), median(services), _added(pairs), low, high, p95(bares), p95(services))


async def measured_throughput(bare: Way, service: Way, plan: Plan) -> Throughput:
    """Measure rounds, for ``plan.throughput_seconds``."""
    seconds: dict[str, list[float]] = {bare.name: [], service.name: []}
    firsts: dict[str, list[float]] = {bare.name: [], service.name: []}
    cpu: float | None = 0.0
    end = time.perf_counter() + plan.throughput_seconds
    while time.perf_counter() < end or len(seconds[bare.name]) < _MIN_ROUNDS:
        for way in _in_turn(bare, service, len(seconds[bare.name])):
            before = await _cpu_seconds(service) if way is service else None
            elapsed, first = await _round(way, plan)
            seconds[way.name].append(elapsed)
            firsts[way.name] += first
            if way is service:
                after = await _cpu_seconds(service)
                cpu = None if cpu is None or before is None or after is None else cpu + after - before
    rounds, of_round = len(seconds[bare.name]), sum(map(plan.tokens_of, range(plan.requests)))
    return Throughput(
        plan.streams,
        plan.requests,
        of_round,
        [of_round / each for each in seconds[bare.name]],
        [of_round / each for each in seconds[service.name]],
        1 - sum(seconds[bare.name]) / sum(seconds[service.name]),
        median(firsts[bare.name]),
        median(firsts[service.name]),
        None if cpu is None else cpu / (rounds * of_round),
    )


async def _round(way: Way, plan: Plan) -> tuple[float, list[float]]:
    """Send all requests of a round; returns how long it took, and the times to first tokens."""
    requests = iter(
        [
            request_bytes(way.address, _ROUTE, way.headers, plan.body(number, plan.tokens_of(number)))
            for number in range(plan.requests)
        ]
    )
    tally = Tally()
    firsts: list[float] = []

    async def one_after_the_other() -> None:
        firsts.extend([await read(way.address, request, tally) for request in requests])

    began = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(plan.streams)))
    elapsed = time.perf_counter() - began
    tally.check(plan.requests, way.name)
    return elapsed, firsts


def _in_turn(bare: Way, service: Way, number: int) -> tuple[Way, Way]:
    return (service, bare) if number % 2 else (bare, service)


async def _model(client: httpx.AsyncClient, way: Way) -> str:
    answer = await client.get(f"{way.address}/v1/models", headers=way.headers)
    if answer.status_code != httpx.codes.OK:
        raise NotComparable(f"{way.name}: /v1/models was answered with status {answer.status_code}")
    # A model without a name is served under its folder's path.
    return str(answer.json()["data"][0]["id"]).rstrip("/").rpartition("/")[2]


async def _reported_tokens(client: httpx.AsyncClient, way: Way, plan: Plan) -> int | None:
    """Ask for one answer, and return how many tokens it says that it has."""
    body = plan.body(0, plan.tokens) | {"stream_options": {"include_usage": True}}
    tokens = None
    async with client.stream("POST", way.address + _ROUTE, json=body, headers=way.headers) as answer:
        if answer.status_code != httpx.codes.OK:
            raise NotComparable(f"{way.name}: status {answer.status_code}: {(await answer.aread()).decode()[:500]}")
        async for line in answer.aiter_lines():
            event = line.removeprefix("data: ")
            if event.startswith("{") and (usage := json.loads(event).get("usage")):
                tokens = int(usage["completion_tokens"])
    return tokens


async def _cpu_seconds(service: Way) -> float | None:
    async with httpx.AsyncClient(timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
        answer = await client.get(f"{service.address}/metrics", headers=service.headers)
    lines = answer.text.splitlines() if answer.status_code == httpx.codes.OK else []
    return next((float(line.removeprefix(_CPU_METRIC)) for line in lines if line.startswith(_CPU_METRIC)), None)


def _added(pairs: Sequence[tuple[float, float]]) -> float:
    return median(service for _, service in pairs) - median(bare for bare, _ in pairs)


def _interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    draw = random.Random(0)
    found = sorted(_added(draw.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    return found[_RESAMPLES * 25 // 1000], found[_RESAMPLES * 975 // 1000 - 1]
