"""HTTP to one runtime. Its failures leave this module as ``RuntimeFailure``, never as httpx's exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import httpx
from pydantic import AnyUrl

from winnow_service.errors import RuntimeDied, RuntimeFailure, RuntimeTimeout, RuntimeUnavailable
from winnow_service.headers import RawHeaders
from winnow_service.runtime.failures import FirstTokenTimeout, RequestTimeout
from winnow_service.settings import Settings

# A connection that is there already saves half a millisecond. It is used again well before SGLang closes an idle one,
# after 5 seconds: a request on a connection that is being closed would fail, and the runtime would never have read it.
_KEPT_SECONDS: Final = 1.0

# Returns the transport with a span for each request that it sends.
Traced = Callable[[httpx.AsyncBaseTransport], httpx.AsyncBaseTransport]


@dataclass(frozen=True)
class RuntimeRequest:
    """What is sent to the runtime, as it is sent.

    Attributes:
        streams: whether it asks for its answer token by token.
    """

    method: str
    path: str
    query: bytes
    headers: RawHeaders
    body: bytes
    streams: bool = False


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

    def __init__(self, response: httpx.Response, client: RuntimeClient, patience: Patience) -> None:
        self._response = response
        self._client = client
        self._patience = patience
        self.status = response.status_code

    @property
    def headers(self) -> RawHeaders:
        return self._response.headers.raw

    @property
    def is_event_stream(self) -> bool:
        content_type: str = self._response.headers.get("content-type", "")
        return content_type.partition(";")[0].strip().lower() == "text/event-stream"

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, as it arrives.

        Raises:
            RuntimeFailure: no more of it is to come.
        """
        with self._client.failures(self._patience.exhausted):
            async with self._patience.wait() as limit:
                async for chunk in self._response.aiter_raw():
                    # What the client does meanwhile is not the runtime's.
                    limit.reschedule(None)
                    self._patience.heard()
                    yield chunk
                    limit.reschedule(self._patience.until)

    async def close(self) -> None:
        await self._response.aclose()


class RuntimeClient:
    """Sends requests to one runtime.

    Attributes:
        name: by which it is known in logs and metrics.
    """

    def __init__(self, url: AnyUrl, name: str, settings: Settings, traced: Traced | None) -> None:
        self._address = str(url).rstrip("/")
        self._settings = settings
        self.name = name
        transport: httpx.AsyncBaseTransport = httpx.AsyncHTTPTransport(
            # The service has its own queue, so the pool must not.
            limits=httpx.Limits(
                max_connections=None,
                # httpcore counts those in use too: with any number, none would be kept while so many streams run.
                max_keepalive_connections=None,
                keepalive_expiry=_KEPT_SECONDS,
            ),
            trust_env=False,
        )
        self._transport = transport if traced is None else traced(transport)
        # Whoever waits for an answer says how long.
        timeout = httpx.Timeout(None, connect=settings.runtime_connect_timeout_seconds)
        self._extensions = {"timeout": timeout.as_dict()}
        self._http = httpx.AsyncClient(
            base_url=self._address,
            timeout=timeout,
            transport=self._transport,
            # A proxy of the environment is not between the service and its runtime.
            trust_env=False,
        )

    async def send(self, request: RuntimeRequest) -> RuntimeAnswer:
        """Send ``request`` and wait for the head of its answer, which the caller closes.

        Raises:
            RuntimeFailure: there is no answer.
        """
        url = httpx.URL(self._address + request.path, query=request.query or None)
        # Not by the client, whose cookies, redirects and headers of its own are not for what is passed on.
        outgoing = httpx.Request(
            request.method, url, headers=request.headers, content=request.body, extensions=self._extensions
        )
        patience = Patience(self._settings, streams=request.streams)
        with self.failures(patience.exhausted):
            async with patience.wait():
                return RuntimeAnswer(await self._transport.handle_async_request(outgoing), self, patience)

    async def get(self, path: str, timeout_seconds: float, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """The runtime's whole answer to ``GET path``. Raises as ``send`` does."""
        with self.failures(lambda: RuntimeTimeout(timeout_seconds)):
            return await self._http.get(path, headers=headers, timeout=timeout_seconds)

    async def close(self) -> None:
        await self._http.aclose()

    @contextmanager
    def failures(self, too_late: Callable[[], RuntimeFailure]) -> Iterator[None]:
        """Turn time-outs and httpx's exceptions into the service's."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise RuntimeUnavailable(f"{self._address}: {_detail(error)}") from error
        except (TimeoutError, httpx.TimeoutException) as error:
            raise too_late() from error
        except httpx.HTTPError as error:
            raise RuntimeDied(_detail(error)) from error


def _detail(error: httpx.HTTPError) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
