"""HTTP to one runtime. Its failures leave this module as ``RuntimeFailure``, never as httpcore's exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import httpcore
import httpx
from pydantic import AnyUrl

from winnow_service.errors import RuntimeDied, RuntimeFailure, RuntimeTimeout, RuntimeUnavailable
from winnow_service.headers import PREFIX_HEADER, RawHeaders
from winnow_service.runtime.connections import ConnectionPool, LoopBackend
from winnow_service.runtime.failures import FirstTokenTimeout, RequestTimeout
from winnow_service.runtime.prefix import prefix_key
from winnow_service.settings import Settings

# A connection that is there already saves half a millisecond. It is used again well before SGLang closes an idle one,
# after 5 seconds: a request on a connection that is being closed would fail, and the runtime would never have read it.
_KEPT_SECONDS: Final = 1.0

# Without a body, these say that they have none.
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
_OPERATIONS: Final = ("connect", "read", "write")

# Sends a request, and returns when the head of its answer has come.
Send = Callable[[httpcore.Request], Awaitable[httpcore.Response]]
# Returns the same with a span for each request.
Traced = Callable[[Send], Send]


@dataclass(frozen=True)
class RuntimeRequest:
    """What is sent to the runtime, as it is sent.

    Attributes:
        streams: whether it asks for its answer token by token.
        prefix: what it has in common with requests whose radix cache it can use; None if it has no prompt.
    """

    method: str
    path: str
    query: bytes
    headers: RawHeaders
    body: bytes
    streams: bool = False
    prefix: bytes | None = None


class Patience:
    """How long one answer is waited for: its first token, each of the following, and all of it."""

    def __init__(self, settings: Settings, *, streams: bool) -> None:
        self._clock = asyncio.get_running_loop().time
        now = self._clock()
        self._first_seconds = settings.first_token_timeout_seconds
        self._silence_seconds = settings.runtime_silence_timeout_seconds
        self._all_seconds = settings.request_timeout_seconds
        self._end = now + self._all_seconds
        self._streams = streams
        self._begun = False
        self._next = now + self._first_seconds if streams else self._end

    def wait(self) -> asyncio.Timeout:
        """A time-out around the wait for what comes next."""
        return asyncio.timeout_at(min(self._next, self._end))

    @property
    def until(self) -> float:
        """When what comes next must have come, by the clock of the event loop."""
        return min(self._next, self._end)

    def heard(self) -> None:
        """Something came."""
        if self._streams:
            self._begun = True
            self._next = self._clock() + self._silence_seconds

    def exhausted(self) -> RuntimeFailure:
        """What it is that nothing came in time."""
        if self._end <= self._next:
            return RequestTimeout(self._all_seconds)
        return RuntimeTimeout(self._silence_seconds) if self._begun else FirstTokenTimeout(self._first_seconds)


class RuntimeAnswer:
    """An answer whose head has come. Closing it before its end closes the connection, which aborts the generation."""

    def __init__(self, response: httpcore.Response, client: RuntimeClient, patience: Patience) -> None:
        self._response = response
        self._client = client
        self._patience = patience
        self.status = response.status

    @property
    def headers(self) -> RawHeaders:
        return self._response.headers

    @property
    def is_event_stream(self) -> bool:
        content_type = next((value for name, value in self.headers if name.lower() == b"content-type"), b"")
        return content_type.partition(b";")[0].strip().lower() == b"text/event-stream"

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, as it arrives.

        Raises:
            RuntimeFailure: no more of it is to come.
        """
        with self._client.failures(self._patience.exhausted):
            async with self._patience.wait() as limit:
                async for chunk in self._response.aiter_stream():
                    # What the client does meanwhile is not the runtime's.
                    limit.reschedule(None)
                    self._patience.heard()
                    yield chunk
                    limit.reschedule(self._patience.until)

    async def close(self) -> None:
        await _close(self._response)


class RuntimeClient:
    """Sends requests to one runtime.

    Attributes:
        name: by which it is known in logs and metrics.
    """

    def __init__(self, url: AnyUrl, name: str, settings: Settings, traced: Traced | None) -> None:
        self._address = str(url).rstrip("/")
        self._settings = settings
        self.name = name
        self._url = httpx.URL(self._address)
        self._path = self._url.raw_path.rstrip(b"/")
        self._pool = ConnectionPool(
            # Without one, httpcore reads all certificates for each connection: a tenth of a second each time.
            ssl_context=httpcore.default_ssl_context() if self._url.scheme == "https" else None,
            # The service has its own queue, so the pool must not.
            max_connections=None,
            # httpcore counts those in use too: with any number, none would be kept while so many streams run.
            max_keepalive_connections=None,
            keepalive_expiry=_KEPT_SECONDS,
            network_backend=LoopBackend() if self._url.scheme == "http" else None,
        )
        send = self._pool.handle_async_request
        self._send = send if traced is None else traced(send)
        # Whoever waits for an answer says how long.
        self._timeouts = {"connect": settings.runtime_connect_timeout_seconds}

    async def send(self, request: RuntimeRequest) -> RuntimeAnswer:
        """Send ``request`` and wait for the head of its answer, which the caller closes.

        Raises:
            RuntimeFailure: there is no answer.
        """
        patience = Patience(self._settings, streams=request.streams)
        with self.failures(patience.exhausted):
            async with patience.wait():
                return RuntimeAnswer(await self._send(self._outgoing(request, self._timeouts)), self, patience)

    async def get(self, path: str, timeout_seconds: float, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """The runtime's whole answer to ``GET path``. Raises as ``send`` does."""
        return await self._ask("GET", path, b"", timeout_seconds, headers or {})

    async def post(
        self, path: str, body: bytes, timeout_seconds: float, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """The runtime's whole answer to ``POST path`` with a JSON body. Raises as ``send`` does."""
        return await self._ask(
            "POST", path, body, timeout_seconds, {"content-type": "application/json", **(headers or {})}
        )

    async def _ask(
        self, method: str, path: str, body: bytes, timeout_seconds: float, headers: Mapping[str, str]
    ) -> httpx.Response:
        raw_headers = httpx.Headers({"accept-encoding": "identity", **headers}).raw
        request = RuntimeRequest(method, path, b"", raw_headers, body)
        with self.failures(lambda: RuntimeTimeout(timeout_seconds)):
            answer = await self._send(self._outgoing(request, dict.fromkeys(_OPERATIONS, timeout_seconds)))
            try:
                return httpx.Response(answer.status, headers=answer.headers, content=await answer.aread())
            finally:
                await _close(answer)

    async def close(self) -> None:
        await self._pool.aclose()

    @contextmanager
    def failures(self, too_late: Callable[[], RuntimeFailure]) -> Iterator[None]:
        """Turn time-outs and httpcore's exceptions into the service's."""
        try:
            yield
        except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
            raise RuntimeUnavailable(f"{self._address}: {_detail(error)}") from error
        except (TimeoutError, httpcore.TimeoutException) as error:
            raise too_late() from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpx.DecodingError) as error:
            raise RuntimeDied(_detail(error)) from error

    def _outgoing(self, request: RuntimeRequest, timeouts: Mapping[str, float]) -> httpcore.Request:
        target = self._path + request.path.encode("latin-1")
        if request.query:
            target += b"?" + request.query
        own = [(b"host", self._url.netloc)]
        if request.prefix is not None:
            own.append((PREFIX_HEADER, prefix_key(request.prefix)))
        if request.body or request.method in _WITH_BODY:
            own.append((b"content-length", str(len(request.body)).encode()))
        return httpcore.Request(
            request.method,
            httpcore.URL(scheme=self._url.scheme, host=self._url.raw_host, port=self._url.port, target=target),
            headers=own + request.headers,
            content=request.body,
            extensions={"timeout": timeouts},
        )


def authorization(settings: Settings) -> dict[str, str]:
    """The headers of what the service asks the runtime itself."""
    key = settings.runtime_api_key
    return {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}


async def _close(response: httpcore.Response) -> None:
    # httpcore keeps for ever a connection whose closing is cancelled, and its request.
    await asyncio.shield(response.aclose())


def _detail(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
