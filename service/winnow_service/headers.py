"""Which headers cross the service, in each direction."""

from __future__ import annotations

from collections.abc import Iterable

# RFC 9110, section 7.6.1, and the older names that RFC 2616 lists.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# The client library writes its own Host and Content-Length. Answers must come uncompressed for their end to be seen.
_NOT_TO_RUNTIME = _HOP_BY_HOP | {"host", "content-length", "accept-encoding", "expect"}
# The server writes its own Date, Server and Content-Length.
_NOT_TO_CLIENT = _HOP_BY_HOP | {"date", "server", "content-length"}


def to_runtime(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers of a client's request that the runtime is sent."""
    return [*_without(headers, _NOT_TO_RUNTIME), ("accept-encoding", "identity")]


def to_client(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers of the runtime's answer that the client is sent."""
    return _without(headers, _NOT_TO_CLIENT)


def _without(headers: Iterable[tuple[str, str]], dropped: frozenset[str]) -> list[tuple[str, str]]:
    pairs = [(name.lower(), value) for name, value in headers]
    named_by_connection = {
        token.strip().lower() for name, value in pairs if name == "connection" for token in value.split(",")
    }
    return [(name, value) for name, value in pairs if name not in dropped and name not in named_by_connection]
