"""Connections to a runtime, for httpcore, made and used by the event loop itself; without TLS.

Those that httpcore has by default wait for a turn of the loop at each write, and ask the kernel to watch and forget the
socket at each read: a tenth of a millisecond before the first token.
"""

# ruff: noqa: ASYNC109 the time-outs are of httpcore's interface

from __future__ import annotations

import asyncio
import ipaddress
import select
import socket
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import aiohappyeyeballs
import httpcore

# As long as the standard asks for (RFC 8305, section 5), the next address of a name is not tried.
_NEXT_ADDRESS_SECONDS: Final = 0.25
# So much of an answer is held that has not been asked for, about.
_HELD_BYTES: Final = 65_536


class ConnectionPool(httpcore.AsyncConnectionPool):
    """httpcore's, without its leak: it keeps for ever what was connected for a request that is cancelled just then."""

    def create_connection(self, origin: httpcore.Origin) -> httpcore.AsyncConnectionInterface:
        return _PooledConnection(
            origin, self._ssl_context, self._keepalive_expiry, network_backend=self._network_backend
        )


class _PooledConnection(httpcore.AsyncHTTPConnection):
    _used = False

    async def handle_async_request(self, request: httpcore.Request) -> httpcore.Response:
        try:
            return await super().handle_async_request(request)
        except BaseException:
            # No other request waits for it before the first has ended.
            if not self._used:
                await self.aclose()
            raise
        finally:
            self._used = True


class LoopBackend(httpcore.AsyncNetworkBackend):
    """Connects by the running loop."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                return await _connect(host, port)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error


class Connection(asyncio.Protocol, httpcore.AsyncNetworkStream):
    """One connection, for one reader and one writer."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._received = bytearray()
        self._ended = False
        self._error: Exception | None = None
        self._reading: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._writable = True

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if not self._received and not self._ended:
            self._reading = asyncio.get_running_loop().create_future()
            await _wait_for(self._reading, timeout, httpcore.ReadTimeout)
        if not self._received and self._error is not None:
            raise httpcore.ReadError(str(self._error)) from self._error
        data = bytes(self._received[:max_bytes])
        del self._received[:max_bytes]
        if not self._received and not self._ended:
            self._transport.resume_reading()
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if not self._ended:
            self._transport.write(buffer)
        if not self._writable and not self._ended:
            self._writing = asyncio.get_running_loop().create_future()
            await _wait_for(self._writing, timeout, httpcore.WriteTimeout)
        if self._ended:
            raise httpcore.WriteError(str(self._error or "the connection is closed")) from self._error

    async def aclose(self) -> None:
        # To whoever still reads, this must not look like the end of the answer.
        self._end(ConnectionAbortedError("the connection is closed"))
        self._transport.abort()

    def get_extra_info(self, info: str) -> Any:
        # While no answer is expected, what comes is the end of the connection. The loop may not have seen it yet.
        return self._ended or bool(self._received) or _has_input(self._transport) if info == "is_readable" else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none by inheritance.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) > _HELD_BYTES:
            self._transport.pause_reading()
        _wake(self._reading)

    def eof_received(self) -> None:
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        _wake(self._writing)

    def _end(self, error: Exception | None) -> None:
        self._ended = True
        self._error = self._error or error
        _wake(self._reading)
        _wake(self._writing)


async def _connect(host: str, port: int) -> Connection:
    loop = asyncio.get_running_loop()
    try:
        ipaddress.ip_address(host)
    except ValueError:
        addresses = await _look_up(host, port)
        # The loop's own way waits for a name's first address until there is no time left.
        found = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS)
        _, connection = await loop.create_connection(Connection, sock=found)
    else:
        _, connection = await loop.create_connection(Connection, host, port)
    return connection


async def _look_up(host: str, port: int) -> Sequence[aiohappyeyeballs.AddrInfoType]:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _has_input(transport: asyncio.Transport) -> bool:
    if transport.is_closing():
        return True
    poll = select.poll()
    poll.register(transport.get_extra_info("socket"), select.POLLIN)
    return bool(poll.poll(0))


async def _wait_for(
    waiter: asyncio.Future[None], timeout: float | None, too_late: type[httpcore.TimeoutException]
) -> None:
    try:
        async with asyncio.timeout(timeout):
            await waiter
    except TimeoutError as error:
        raise too_late from error


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
