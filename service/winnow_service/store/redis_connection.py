"""Reaching Redis: from the address that an operator gives to the client of the server that takes writes.

redis-py reads addresses of one server. What it lacks is here. It has no address for sentinels, and one host for a
cluster. It passes over a database that is no number and an option that does not exist until the first connection
fails, if at all.

All of Winnow's keys share one hash tag, so a cluster keeps them in one slot, and its primary serves all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from winnow_service.errors import StoreUnavailable

SCHEMES: Final = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_TLS_OPTIONS: Final = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"})
_SENTINEL_OPTIONS: Final = frozenset({"sentinel_username", "sentinel_password"})
_DEFAULT_PORTS: Final = {"": 6379, "sentinel": 26379, "cluster": 6379}

_CONNECT_SECONDS = 1.0
_ANSWER_SECONDS = 2.0
# More than this many operations at once wait here and not in connections.
_CONNECTIONS = 64
# uvloop raises RuntimeError where something is written to a connection that has been closed meanwhile.
_FAILURES = (RedisError, OSError, TimeoutError, RuntimeError)


class StoreAddressError(ValueError):
    """An address of a store that cannot be used. The message quotes no part that may be secret."""


@dataclass(frozen=True)
class RedisAddress:
    """Where Redis is.

    Attributes:
        kind: "sentinel", "cluster", or empty for one server.
        hosts: the server, the sentinels, or some nodes of the cluster.
        service: what the sentinels call the primary.
        options: arguments of a connection: database, credentials, TLS.
        sentinel_options: the same for connections to sentinels.
    """

    kind: str
    hosts: tuple[tuple[str, int], ...]
    service: str
    options: Mapping[str, Any] = field(repr=False)
    sentinel_options: Mapping[str, Any] = field(repr=False)

    @property
    def description(self) -> str:
        """The hosts, without credentials."""
        return ",".join(f"{host}:{port}" for host, port in self.hosts)


def parse_redis_url(url: str, password: str | None = None) -> RedisAddress:
    """Read ``redis[s][+sentinel|+cluster]://[user:password@]host[:port][,…][/service][/database][?option=…]``.

    Args:
        password: in place of one in the URL.

    Raises:
        StoreAddressError: it is not such a URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise StoreAddressError(f"the scheme must be one of {', '.join(SCHEMES)}")
    scheme, _, kind = parts.scheme.partition("+")
    credentials, at, netloc = parts.netloc.rpartition("@")
    hosts = tuple(_host(host, _DEFAULT_PORTS[kind]) for host in netloc.split(","))
    if kind == "" and len(hosts) > 1:
        raise StoreAddressError("several hosts need redis+sentinel:// or redis+cluster://")
    path = [part for part in parts.path.split("/") if part]
    service = path.pop(0) if kind == "sentinel" and path else ""
    if kind == "sentinel" and not service:
        raise StoreAddressError("the path must begin with the name that the sentinels know the primary by")
    database = path.pop(0) if path else "0"
    if path or not database.isdecimal() or (kind == "cluster" and database != "0"):
        raise StoreAddressError("the path must end with the number of a database (in a cluster 0)")
    given = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    unknown = given.keys() - _TLS_OPTIONS - (_SENTINEL_OPTIONS if kind == "sentinel" else frozenset())
    if unknown:
        raise StoreAddressError(f"unknown option {min(unknown)!r}; there are {', '.join(sorted(_TLS_OPTIONS))}")
    tls = {name: value for name, value in given.items() if name in _TLS_OPTIONS}
    try:
        options = dict(parse_url(f"{scheme}://{credentials}{at}host/{database}?{urlencode(tls, quote_via=quote)}"))
    except ValueError as error:
        raise StoreAddressError(str(error)) from None
    del options["host"]
    if options.pop("connection_class", None) is not None:
        options["ssl"] = True
    if password is not None:
        options["password"] = password
    sentinel_options = {name: value for name, value in options.items() if name.startswith("ssl")}
    sentinel_options |= {
        name.removeprefix("sentinel_"): value for name, value in given.items() if name in _SENTINEL_OPTIONS
    }
    return RedisAddress(kind, hosts, service, options, sentinel_options)


@dataclass
class _SharedClient:
    """A client, and how many operations use it."""

    client: Redis
    users: int = 0


class RedisConnection:
    """The server that takes writes now.

    Attributes:
        address: where to look for it.
        prefix: how all keys of this deployment begin, with a hash tag.
    """

    def __init__(self, address: RedisAddress, namespace: str) -> None:
        self.address = address
        self.prefix = f"{{{namespace}}}:"
        self._shared: _SharedClient | None = None
        self._finding = asyncio.Lock()
        self._slots = asyncio.Semaphore(_CONNECTIONS)

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Redis]:
        """The client, for one operation, or a subscription, which never ends. What fails within is StoreUnavailable."""
        try:
            async with self._slots, self._lent() as client:
                yield client
        except _FAILURES as error:
            raise StoreUnavailable(
                f"Redis at {self.address.description}: {str(error).rstrip('.') or type(error).__name__}"
            ) from error

    async def close(self) -> None:
        if self._shared is not None:
            shared, self._shared = self._shared, None
            await shared.client.aclose()

    @asynccontextmanager
    async def _lent(self) -> AsyncIterator[Redis]:
        async with self._finding:
            if self._shared is None:
                self._shared = _SharedClient(await self._find())
            shared = self._shared
        shared.users += 1
        try:
            yield shared.client
        except _FAILURES:
            # Its other connections are as broken, and nobody has noticed yet; in a cluster another node may have the
            # slot by now. Whoever uses one goes on with it: closed under their hands it would fail in ways of its own.
            if self._shared is shared:
                self._shared = None
            raise
        finally:
            shared.users -= 1
            if shared.users == 0 and self._shared is not shared:
                # What was done with it is done, however its connections end.
                with suppress(*_FAILURES):
                    await shared.client.aclose()

    async def _find(self) -> Redis:
        match self.address.kind:
            case "sentinel":
                # The client asks the sentinels at every new connection.
                sentinel_options = {**_timeouts(), **self.address.sentinel_options}
                sentinel: Any = Sentinel(self.address.hosts, sentinel_kwargs=sentinel_options, **self._options())  # type: ignore[no-untyped-call]
                client: Redis = sentinel.master_for(self.address.service)
                return client
            case "cluster":
                host, port = await self._primary_of_cluster()
            case _:
                [(host, port)] = self.address.hosts
        return Redis(host=host, port=port, **self._options())

    async def _primary_of_cluster(self) -> tuple[str, int]:
        nodes = [ClusterNode(host, port) for host, port in self.address.hosts]
        options = {name: value for name, value in self._options().items() if name != "db"}
        cluster = RedisCluster(startup_nodes=nodes, **options)
        try:
            await cluster.initialize()
            node = cluster.get_node_from_key(self.prefix)
            assert node is not None
            return node.host, int(node.port)
        finally:
            await cluster.aclose()

    def _options(self) -> dict[str, Any]:
        return {**_timeouts(), "decode_responses": True, **self.address.options}


def _timeouts() -> dict[str, Any]:
    # A write that is sent twice would meet its own first copy and be told of a conflict: nothing is retried.
    return {
        "socket_connect_timeout": _CONNECT_SECONDS,
        "socket_timeout": _ANSWER_SECONDS,
        "retry": Retry(NoBackoff(), 0),
    }


def _host(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        raise StoreAddressError("a port must be a number up to 65535") from None
    if not parts.hostname:
        raise StoreAddressError("a host is missing")
    return parts.hostname, port or default_port
