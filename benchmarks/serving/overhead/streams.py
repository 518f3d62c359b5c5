"""A client that reads many streams at once for little work of its own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import quantiles
from typing import Any, Final
from urllib.parse import urlsplit

from benchmarks.serving.overhead.standin import MODEL, Pace

_ROUTE: Final = "/v1/chat/completions"
_EVENT: Final = b"data: "
_DONE: Final = b"data: [DONE]\n\n"


class Incomplete(Exception):
    """Streams did not come to their end: there is nothing to measure."""


@dataclass
class Tally:
    """What has come on all streams so far.

    Attributes:
        open: streams that have begun and not ended.
        most_open: at any one time.
        finished: streams that were complete.
        broken: streams that ended otherwise, or were refused.
        events: of all streams, those at the end of each too.
    """

    open: int = 0
    most_open: int = 0
    finished: int = 0
    broken: int = 0
    events: int = 0
    refusals: list[str] = field(default_factory=list)

    def check(self, streams: int, where: str = "the service") -> None:
        """Raise Incomplete if fewer than ``streams`` were complete."""
        if self.finished != streams:
            raise Incomplete(f"{where}: {self.finished} of {streams} streams were complete: {self.refusals[:1]}")


@dataclass(frozen=True)
class Target:
    """Where streams are asked for, and how.

    Attributes:
        headers: beside those that every request has.
        members: of the body, likewise.
    """

    address: str
    headers: Mapping[str, str] = field(default_factory=dict)
    members: Mapping[str, Any] = field(default_factory=dict)

    def request(self, pace: Pace) -> bytes:
        """The bytes of a request for a stream."""
        message = {"role": "user", "content": "A prompt of some words. " * 20}
        body = {"model": MODEL, "messages": [message], "stream": True, "max_tokens": 4096, "paced": asdict(pace)}
        return request_bytes(self.address, _ROUTE, self.headers, body | dict(self.members))


def request_bytes(address: str, route: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> bytes:
    """Return a request as it is sent, on a connection of its own."""
    content = json.dumps(body).encode()
    all_headers = {
        "host": urlsplit(address).netloc,
        "content-type": "application/json",
        "content-length": str(len(content)),
        "connection": "close",
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
    return f"POST {route} HTTP/1.1\r\n{head}\r\n".encode() + content


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, tally: Tally) -> None:
        self._request = request
        self._tally = tally
        self._rest = b""
        self._refused = False
        self._done = False
        self._sent = 0.0
        self.first_event: float | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._rest:
            self._refused = not data.startswith(b"HTTP/1.1 200")
            self._tally.open += 1
            self._tally.most_open = max(self._tally.most_open, self._tally.open)
        seen = self._rest + data
        events = seen.count(_EVENT)
        if self._refused:
            self._tally.refusals.append(data.decode(errors="replace"))
        if events and self.first_event is None:
            self.first_event = time.perf_counter() - self._sent
        self._tally.events += events
        self._done = self._done or _DONE in seen
        # A part of an event's beginning may come with what follows.
        self._rest = seen[1 - len(_EVENT) :] if not self._done else b"."

    def connection_lost(self, exc: Exception | None) -> None:
        if self._rest:
            self._tally.open -= 1
        if self._done and not self._refused:
            self._tally.finished += 1
        else:
            self._tally.broken += 1
        self.ended.set_result(None)


async def stream(target: Target, pace: Pace, tally: Tally) -> float:
    """Read one stream to its end. Returns what ``read`` does."""
    return await read(target.address, target.request(pace), tally)


async def read(address: str, request: bytes, tally: Tally) -> float:
    """Send ``request``, and read the stream that answers it to its end.

    Returns:
        Seconds from sending the request to the first event; infinity if there was none.
    """
    url = urlsplit(address)
    assert url.hostname is not None
    assert url.port is not None
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(lambda: _Stream(request, tally), url.hostname, url.port)
    await protocol.ended
    return float("inf") if protocol.first_event is None else protocol.first_event


def p95(values: Sequence[float]) -> float:
    """Return the 95th percentile."""
    return quantiles(values, n=20)[-1]
