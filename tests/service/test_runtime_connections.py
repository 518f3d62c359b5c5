"""The connections to a runtime, on both event loops."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager

import httpcore
import pytest
import uvloop

from tests.ports import free_port
from winnow_service.runtime import connections
from winnow_service.runtime.connections import LoopBackend

LONG = b"0123456789abcdef" * 65_536
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> asyncio.Runner:
    return asyncio.Runner(loop_factory=request.param)


@asynccontextmanager
async def connected(serve: Serve) -> AsyncIterator[httpcore.AsyncNetworkStream]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connection = await LoopBackend().connect_tcp("127.0.0.1", server.sockets[0].getsockname()[1], timeout=5)
    try:
        yield connection
    finally:
        await connection.aclose()
        server.close()


async def read_all(connection: httpcore.AsyncNetworkStream) -> bytes:
    parts = []
    while part := await connection.read(65_536, timeout=5):
        parts.append(part)
    return b"".join(parts)


@asynccontextmanager
async def connected_to_socket() -> AsyncIterator[tuple[httpcore.AsyncNetworkStream, socket.socket]]:
    """A connection, and its other end, which acts while the loop does not turn."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = await LoopBackend().connect_tcp("127.0.0.1", server.getsockname()[1], timeout=5)
        other, _ = server.accept()
    with other:
        yield connection, other
    await connection.aclose()


def wait_for_input(connection: httpcore.AsyncNetworkStream) -> None:
    end = time.monotonic() + 5
    while not connection.get_extra_info("is_readable"):
        assert time.monotonic() < end
        time.sleep(0.001)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.readexactly(len(LONG)))
    await writer.drain()
    writer.close()


def test_long_messages_arrive_whole_and_so_does_the_end(runner: asyncio.Runner) -> None:
    async def exchange() -> None:
        async with connected(echo) as connection:
            await connection.write(LONG, timeout=5)
            assert await read_all(connection) == LONG
            assert connection.get_extra_info("is_readable")

    with runner:
        runner.run(exchange())


def test_a_reader_that_waits_holds_the_sender_up(runner: asyncio.Runner) -> None:
    taken = 0

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        for _turn in range(64):
            writer.write(LONG)
            await writer.drain()
            taken += 1
        writer.close()

    async def exchange() -> None:
        async with connected(pour) as connection:
            await asyncio.sleep(0.5)
            assert taken < 64
            assert len(await read_all(connection)) == 64 * len(LONG)

    with runner:
        runner.run(exchange())


def test_what_is_not_taken_holds_the_writer_up(runner: asyncio.Runner) -> None:
    async def idle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)
        writer.close()

    async def exchange() -> None:
        async with connected(idle) as connection:
            with pytest.raises(httpcore.WriteTimeout):
                await connection.write(LONG * 64, timeout=0.2)

    with runner:
        runner.run(exchange())


def test_silence_is_a_timeout_and_a_port_without_server_an_error(runner: asyncio.Runner) -> None:
    async def exchange() -> None:
        async with connected(echo) as connection:
            assert not connection.get_extra_info("is_readable")
            with pytest.raises(httpcore.ReadTimeout):
                await connection.read(1, timeout=0.1)
        with pytest.raises(httpcore.ConnectError):
            await LoopBackend().connect_tcp("127.0.0.1", free_port(), timeout=5)

    with runner:
        runner.run(exchange())


def test_a_connection_that_is_reset_is_an_error(runner: asyncio.Runner) -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        # To be closed without the usual end.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def exchange() -> None:
        async with connected(reset) as connection:
            await connection.write(b".", timeout=5)
            with pytest.raises(httpcore.ReadError):
                await connection.read(1, timeout=5)
            with pytest.raises(httpcore.WriteError):
                await connection.write(b".", timeout=5)

    with runner:
        runner.run(exchange())


def test_the_end_is_known_before_the_loop_has_seen_it(runner: asyncio.Runner) -> None:
    async def exchange() -> None:
        async with connected_to_socket() as (connection, other):
            assert not connection.get_extra_info("is_readable")
            other.close()
            wait_for_input(connection)

    with runner:
        runner.run(exchange())


def test_closing_is_not_the_end_of_an_answer(runner: asyncio.Runner) -> None:
    async def exchange() -> None:
        async with connected_to_socket() as (connection, _):
            reading = asyncio.create_task(connection.read(1, timeout=5))
            await asyncio.sleep(0)
            await connection.aclose()
            with pytest.raises(httpcore.ReadError):
                await reading

    with runner:
        runner.run(exchange())


def test_the_first_address_that_answers_is_taken(runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue of an address is full, so that it neither accepts nor refuses, and a name has another."""
    monkeypatch.setattr(connections, "_NEXT_ADDRESS_SECONDS", 0.01)

    async def exchange() -> None:
        with socket.create_server(("127.0.0.1", 0)) as alive, socket.socket() as dead, ExitStack() as waiting:
            port = alive.getsockname()[1]
            dead.bind(("127.0.0.9", port))
            dead.listen(0)
            for _ in range(3):
                other = waiting.enter_context(socket.socket())
                other.setblocking(False)
                other.connect_ex(("127.0.0.9", port))

            async def look_up(*_: object, **__: object) -> list[object]:
                kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
                return [(*kind, (host, port)) for host in ("127.0.0.9", "127.0.0.1")]

            monkeypatch.setattr(connections, "_look_up", look_up)
            connection = await LoopBackend().connect_tcp("runtime", port, timeout=5)
            accepted, _ = alive.accept()
            accepted.close()
            await connection.aclose()

    with runner:
        runner.run(exchange())
