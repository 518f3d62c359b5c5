"""Which headers cross the service, in each direction."""

from __future__ import annotations

from collections.abc import Iterable

from winnow_service.headers import PREFIX_HEADER, RUNTIME_HEADER, RawHeaders

# RFC 9110, section 7.6.1, and the older names that RFC 2616 lists.
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
# The runtime's client writes its own Host, Content-Length and prefix. Answers must come uncompressed: their end must be
# seen.
_NOT_TO_RUNTIME = _HOP_BY_HOP | {b"host", b"content-length", b"accept-encoding", b"expect", PREFIX_HEADER}
# The server writes its own Date, Server and Content-Length.
_NOT_TO_CLIENT = _HOP_BY_HOP | {b"date", b"server", b"content-length", RUNTIME_HEADER}


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
