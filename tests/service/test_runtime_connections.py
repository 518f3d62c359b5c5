"""The connections to a runtime, on both event loops."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpcore
import pytest
import uvloop

from tests.ports import free_port
from winnow_service.runtime.connections import LoopBackend

LONG = b"0123456789abcdef" * 65_536
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> asyncio.Runner:
    return asyncio.Runner(loop_factory=request.param)


@asynccontextmanager
async def connected(serve: Serve, context: ssl.SSLContext | None = None) -> AsyncIterator[httpcore.AsyncNetworkStream]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
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


def test_tls_is_spoken_with_a_runtime_whose_certificate_is_known(runner: asyncio.Runner, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files],
        check=True,
        capture_output=True,
    )
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    knowing = ssl.create_default_context(cafile=str(certificate))

    async def exchange() -> None:
        async with connected(echo, server) as connection:
            encrypted = await connection.start_tls(knowing, "localhost", timeout=5)
            await encrypted.write(LONG, timeout=5)
            assert await read_all(encrypted) == LONG
            await encrypted.aclose()
        async with connected(echo, server) as connection:
            with pytest.raises(httpcore.ConnectError):
                await connection.start_tls(ssl.create_default_context(), "localhost", timeout=5)

    with runner:
        runner.run(exchange())
