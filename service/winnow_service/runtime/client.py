"""HTTP to the runtime. Its failures leave this module as ``RuntimeFailure``, never as httpx's exceptions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from winnow_service.errors import RuntimeDied, RuntimeTimeout, RuntimeUnavailable
from winnow_service.settings import Settings


@dataclass(frozen=True)
class RuntimeRequest:
    """What is sent to the runtime, as it is sent."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[str, str]]
    body: bytes


class RuntimeAnswer:
    """An answer whose head has come. Closing it before its end closes the connection, which aborts the generation."""

    def __init__(self, response: httpx.Response, client: RuntimeClient) -> None:
        self._response = response
        self._client = client
        self.status = response.status_code

    @property
    def headers(self) -> list[tuple[str, str]]:
        return list(self._response.headers.multi_items())

    @property
    def is_event_stream(self) -> bool:
        content_type: str = self._response.headers.get("content-type", "")
        return content_type.partition(";")[0].strip().lower() == "text/event-stream"

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, as it arrives.

        Raises:
            RuntimeTimeout, RuntimeDied: no more of it is to come.
        """
        with self._client.failures():
            async for chunk in self._response.aiter_raw():
                yield chunk

    async def read(self) -> bytes:
        """The whole body. Raises as ``chunks`` does."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def close(self) -> None:
        await self._response.aclose()


class RuntimeClient:
    """Sends requests to one runtime."""

    def __init__(self, settings: Settings) -> None:
        self._address = str(settings.runtime_url).rstrip("/")
        self._silence_seconds = settings.runtime_silence_timeout_seconds
        self._http = httpx.AsyncClient(
            base_url=self._address,
            timeout=httpx.Timeout(
                settings.runtime_silence_timeout_seconds, connect=settings.runtime_connect_timeout_seconds, pool=None
            ),
            # The runtime queues, so the pool must not. A new connection for each request: a kept one that the runtime
            # closes at that moment would fail a request which the runtime never read.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            # A proxy of the environment is not between the service and its runtime.
            trust_env=False,
        )

    @property
    def address(self) -> str:
        return self._address

    async def send(self, request: RuntimeRequest) -> RuntimeAnswer:
        """Send ``request`` and wait for the head of its answer, which the caller closes.

        Raises:
            RuntimeUnavailable, RuntimeTimeout, RuntimeDied: there is no answer.
        """
        url = httpx.URL(self._address + request.path, query=request.query or None)
        outgoing = self._http.build_request(request.method, url, headers=request.headers, content=request.body)
        with self.failures():
            return RuntimeAnswer(await self._http.send(outgoing, stream=True), self)

    async def get(self, path: str, timeout_seconds: float, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """The runtime's whole answer to ``GET path``. Raises as ``send`` does."""
        with self.failures(timeout_seconds):
            return await self._http.get(path, headers=headers, timeout=timeout_seconds)

    async def close(self) -> None:
        await self._http.aclose()

    @contextmanager
    def failures(self, silence_seconds: float | None = None) -> Iterator[None]:
        """Turn httpx's exceptions into the service's."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise RuntimeUnavailable(f"{self._address}: {_detail(error)}") from error
        except httpx.TimeoutException as error:
            raise RuntimeTimeout(silence_seconds or self._silence_seconds) from error
        except httpx.HTTPError as error:
            raise RuntimeDied(_detail(error)) from error


def _detail(error: httpx.HTTPError) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
