"""Which headers cross the service, in each direction, and how long they may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from winnow_service.errors import INVALID_REQUEST, ServiceError, problem_response
from winnow_service.metrics.instruments import Metrics

# RFC 9110, section 7.6.1, and the older names that RFC 2616 lists.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# By which a balancer between the service and several runtimes sends alike prompts to one of them.
PREFIX_HEADER: Final = b"x-winnow-prefix"
# By which that balancer says that an answer comes from one of several.
RUNTIME_HEADER: Final = b"x-winnow-runtime"
# The runtime's client writes its own Host, Content-Length and prefix. Answers must come uncompressed: their end must be
# seen.
_NOT_TO_RUNTIME = _HOP_BY_HOP | {b"host", b"content-length", b"accept-encoding", b"expect", PREFIX_HEADER}
# The server writes its own Date, Server and Content-Length.
_NOT_TO_CLIENT = _HOP_BY_HOP | {b"date", b"server", b"content-length", RUNTIME_HEADER}


# Names and values, as they are on the wire: a value may be of any encoding.
RawHeaders = list[tuple[bytes, bytes]]


def to_runtime(headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """The headers of a client's request that the runtime is sent."""
    return [*_without(headers, _NOT_TO_RUNTIME), (b"accept-encoding", b"identity")]


def to_client(headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """The headers of the runtime's answer that the client is sent."""
    return _without(headers, _NOT_TO_CLIENT)


def _without(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> RawHeaders:
    pairs = [(name.lower(), value) for name, value in headers]
    named_by_connection = {
        token.strip().lower() for name, value in pairs if name == b"connection" for token in value.split(b",")
    }
    return [(name, value) for name, value in pairs if name not in dropped and name not in named_by_connection]


class HeadersTooLarge(ServiceError):
    """The head of the request is longer than the service takes (431)."""

    def __init__(self, limit_bytes: int) -> None:
        message = f"The request's path and headers are longer than {limit_bytes} bytes (WINNOW_MAX_HEADER_BYTES)."
        super().__init__(431, message, kind=INVALID_REQUEST, code="headers_too_large", headers={"connection": "close"})


class HeaderLimitMiddleware:
    """Refuses requests with long heads. The server's own limit is for heads that do not come to an end."""

    def __init__(self, app: ASGIApp, limit_bytes: int, metrics: Metrics) -> None:
        self._app = app
        self._limit_bytes = limit_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _head_bytes(scope) <= self._limit_bytes:
            await self._app(scope, receive, send)
            return
        refusal = HeadersTooLarge(self._limit_bytes)
        self._metrics.refusals.labels(refusal.code).inc()
        await problem_response(refusal)(scope, receive, send)


def _head_bytes(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope["raw_path"]) + len(scope["query_string"])
