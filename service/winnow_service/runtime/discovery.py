"""Runtimes that a DNS name stands for: its addresses are looked up again and again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import AnyUrl

from winnow_service.metrics.instruments import Metrics

logger = logging.getLogger(__name__)

DNS_SCHEME: Final = "dns+http"
"""Of an address of the settings that stands for all addresses of its host."""
_HTTP_PORT: Final = 80

# Returns the IP addresses that a host name has now, or raises OSError. The second argument is the port.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of ``host``: of version 4 if it has any, because one with both versions is one machine.

    Raises:
        OSError: there are none, or nobody could tell.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError("it is no host name") from error
    by_family: dict[int, list[str]] = {}
    for family, _, _, _, (address, *_) in found:
        # One that holds on one link only names the link too, and is no address of a service.
        if "%" not in str(address):
            by_family.setdefault(family, []).append(str(address))
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or []


@dataclass(frozen=True)
class DiscoveryState:
    """What is known of a name.

    Attributes:
        name: host and port.
        resolved: whether it could be looked up the last time. If not, ``reason`` says why, and ``addresses`` are those
            found before.
        addresses: how many it has.
    """

    name: str
    resolved: bool
    addresses: int
    reason: str


class Discovery:
    """The addresses of one name. Those found last stay when it cannot be looked up, and when it has none.

    Attributes:
        urls: of its runtimes: those known longest first.
    """

    def __init__(self, url: AnyUrl, metrics: Metrics, resolve: Resolve) -> None:
        assert url.host is not None
        self._host = url.host
        self._port = url.port or _HTTP_PORT
        self._path = url.path or ""
        self._name = f"{self._host}:{self._port}"
        self._resolve = resolve
        self._addresses: list[str] = []
        self._problem: str | None = "It has not been looked up yet."
        self.urls: tuple[AnyUrl, ...] = ()
        self._failures = metrics.discovery_failures.labels(self._name)
        metrics.discovered.labels(self._name).set_function(lambda: len(self._addresses))
        metrics.discovery_resolved.labels(self._name).set_function(lambda: self._problem is None)

    @property
    def state(self) -> DiscoveryState:
        reason = self._problem or "It was looked up."
        return DiscoveryState(self._name, self._problem is None, len(self._addresses), reason)

    async def refresh(self) -> None:
        """Look it up once."""
        try:
            found = await self._resolve(self._host, self._port)
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        if not found:
            self._fail("it has no addresses")
            return
        if self._problem is not None:
            logger.info("%s was looked up: %d addresses", self._name, len(set(found)))
        self._problem = None
        # The DNS gives them in any order. What the pool decides by the first of them must not change with it.
        known = [address for address in self._addresses if address in found]
        self._addresses = known + sorted(set(found) - set(known))
        self.urls = tuple(AnyUrl(f"http://{_in_url(each)}:{self._port}{self._path}") for each in self._addresses)

    def _fail(self, reason: str) -> None:
        self._failures.inc()
        problem = f"It could not be looked up: {reason.rstrip('.')}."
        if problem != self._problem:
            logger.warning("%s: %s %d addresses are known", self._name, problem, len(self._addresses))
        self._problem = problem


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
