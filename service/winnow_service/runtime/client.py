"""HTTP to the runtime. Its failures leave this module as ``RuntimeFailure``, never as aiohttp's exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Final

import aiohttp
import httpx
from pydantic import AnyUrl
from yarl import URL

from winnow_service.errors import RuntimeFailure
from winnow_service.headers import PREFIX_HEADER, RawHeaders
from winnow_service.runtime.prefix import prefix_key
from winnow_service.settings import Settings

# A connection that is there already saves half a millisecond. It is used again well before SGLang closes an idle one,
# after 5 seconds: a request on a connection that is being closed would fail, and the runtime would never have read it.
_KEPT_SECONDS: Final = 1.0

# Without a body, these say that they have none.
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
# So much of an answer is held that has not been asked for, about.
_HELD_BYTES: Final = 65_536
# A runtime's head may be longer than aiohttp would take by default.
_LONGEST_LINE: Final = 65_536
_NO_LIMIT: Final = 10_000


class Span:
    """Follows one request to the runtime. This one does nothing."""

    def carried_by(self, headers: RawHeaders) -> RawHeaders:
        """Return the request's headers, with those that tell the runtime of it."""
        return headers

    def answered(self, status: int) -> None:
        """The head of the answer has come."""

    def failed(self, error: BaseException) -> None:
        """There is no answer, or no more of it."""

    def end(self) -> None:
        """The answer has been read or closed, or there is none."""


# Begins to follow a request with this method to this address.
BeginSpan = Callable[[str, URL], Span]


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
        return asyncio.timeout_at(self.until)

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
            return RuntimeFailure("request_timeout", seconds=self._all_seconds)
        if self._begun:
            return RuntimeFailure("runtime_timeout", seconds=self._silence_seconds)
        return RuntimeFailure("first_token_timeout", seconds=self._first_seconds)


class RuntimeAnswer:
    """An answer whose head has come. Closing it before its end closes the connection, which aborts the generation."""

    def __init__(self, response: aiohttp.ClientResponse, span: Span, address: str, patience: Patience | None) -> None:
        self._response = response
        self._span = span
        self._address = address
        self._patience = patience
        self.status = response.status
        self.headers: RawHeaders = list(response.raw_headers)
        self.is_event_stream = response.content_type == "text/event-stream"

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body, as it arrives.

        Raises:
            RuntimeFailure: no more of it is to come.
        """
        assert self._patience is not None
        with _failures(self._address, self._patience.exhausted):
            async with self._patience.wait() as limit, aclosing(self._body()) as body:
                async for chunk in body:
                    # What the client does meanwhile is not the runtime's.
                    limit.reschedule(None)
                    self._patience.heard()
                    yield chunk
                    limit.reschedule(self._patience.until)

    async def read(self) -> bytes:
        """The whole body. aiohttp's exceptions pass."""
        return b"".join([chunk async for chunk in self._body()])

    async def close(self) -> None:
        self._response.close()
        self._span.end()

    async def _body(self) -> AsyncGenerator[bytes, None]:
        try:
            async for chunk, _ in self._response.content.iter_chunks():
                if chunk:
                    yield chunk
        except Exception as error:
            self._span.failed(error)
            raise


class RuntimeClient:
    """Sends requests to one runtime.

    Attributes:
        name: by which it is known in logs and metrics.
    """

    def __init__(self, url: AnyUrl, name: str, settings: Settings, begin_span: BeginSpan | None) -> None:
        self._address = str(url).rstrip("/")
        self._settings = settings
        self.name = name
        self._host = URL(self._address).raw_authority.encode()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                # The service has its own queue, so the pool must not.
                limit=0,
                keepalive_timeout=_KEPT_SECONDS,
                # aiohttp would look for authorities where the system has them, of which an image may have none.
                ssl=httpx.create_ssl_context() if url.scheme == "https" else True,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            # Nothing is added to a client's headers.
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            auto_decompress=False,
            read_bufsize=_HELD_BYTES,
            max_line_size=_LONGEST_LINE,
            max_field_size=_LONGEST_LINE,
            max_headers=_NO_LIMIT,
        )
        self._begin_span = begin_span or (lambda _method, _url: Span())
        # Whoever waits for an answer says how long.
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=settings.runtime_connect_timeout_seconds)

    async def send(self, request: RuntimeRequest) -> RuntimeAnswer:
        """Send ``request`` and wait for the head of its answer, which the caller closes.

        Raises:
            RuntimeFailure: there is no answer.
        """
        patience = Patience(self._settings, streams=request.streams)
        with _failures(self._address, patience.exhausted):
            async with patience.wait():
                return await self._exchange(request, self._timeout, patience)

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
        with _failures(self._address, lambda: RuntimeFailure("runtime_timeout", seconds=timeout_seconds)):
            answer = await self._exchange(
                request, aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=timeout_seconds)
            )
            try:
                return httpx.Response(answer.status, headers=answer.headers, content=await answer.read())
            finally:
                await answer.close()

    async def close(self) -> None:
        await self._session.close()

    async def _exchange(
        self, request: RuntimeRequest, bounds: aiohttp.ClientTimeout, patience: Patience | None = None
    ) -> RuntimeAnswer:
        query = f"?{request.query.decode('latin-1')}" if request.query else ""
        url = URL(self._address + request.path + query, encoded=True)
        headers = [(b"host", self._host), *request.headers]
        if request.prefix is not None:
            headers.append((PREFIX_HEADER, prefix_key(request.prefix)))
        if request.body or request.method in _WITH_BODY:
            headers.append((b"content-length", str(len(request.body)).encode()))
        span = self._begin_span(request.method, url)
        try:
            response = await self._session.request(
                request.method,
                url,
                headers=[(name.decode("latin-1"), _text(value)) for name, value in span.carried_by(headers)],
                data=request.body,
                timeout=bounds,
                allow_redirects=False,
            )
        except BaseException as error:
            span.failed(error)
            span.end()
            raise
        span.answered(response.status)
        return RuntimeAnswer(response, span, self._address, patience)


@contextmanager
def _failures(address: str, too_late: Callable[[], RuntimeFailure]) -> Iterator[None]:
    """Turn time-outs and aiohttp's exceptions into the service's."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise RuntimeFailure("runtime_unavailable", problem=f"{address}: {_detail(error)}") from error
    except aiohttp.ClientConnectionError as error:
        raise RuntimeFailure("runtime_died", problem=_detail(error)) from error
    except TimeoutError as error:
        raise too_late() from error
    except (aiohttp.ClientError, httpx.DecodingError) as error:
        raise RuntimeFailure("runtime_died", problem=_detail(error)) from error


def authorization(settings: Settings) -> dict[str, str]:
    """The headers of what the service asks the runtime itself."""
    key = settings.runtime_api_key
    return {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}


def _text(value: bytes) -> str:
    # aiohttp writes headers as UTF-8. One of another encoding keeps its characters, not its bytes.
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _detail(error: Exception) -> str:
    # aiohttp's own message repeats the address.
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return (str(cause) or type(error).__name__).rstrip(".")
