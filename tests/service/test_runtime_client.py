"""HTTP to one runtime: its connections, and what is passed on."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from pydantic import AnyUrl

from tests.service.waiting import eventually
from winnow_service.errors import RuntimeFailure
from winnow_service.runtime.client import RuntimeClient, RuntimeRequest
from winnow_service.settings import Settings

_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nset-cookie: who=first\r\n\r\n{}"
_REQUEST = RuntimeRequest("POST", "/generate", b"", [(b"content-type", b"application/json")], b"{}")


@dataclass
class Runtime:
    """A runtime that keeps connections open, unless ``closes``.

    Attributes:
        heads: of the requests of each connection.
        may_answer: set while it answers.
        connected: how many connections there are now; ``left`` is set when one has ended.
    """

    closes: bool = False
    answer: bytes = _ANSWER
    heads: list[list[bytes]] = field(default_factory=list)
    connected: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_answer.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads: list[bytes] = []
        self.heads.append(heads)
        self.connected += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                heads.append((await reader.readuntil(b"\r\n\r\n")).lower())
                await reader.readexactly(len(_REQUEST.body) if heads[-1].startswith(b"post") else 0)
                await self.may_answer.wait()
                writer.write(self.answer)
                await writer.drain()
                if self.closes:
                    break
        self.connected -= 1
        self.left.set()
        writer.close()


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest_asyncio.fixture
async def client(runtime: Runtime) -> AsyncIterator[RuntimeClient]:
    server = await asyncio.start_server(runtime.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = RuntimeClient(AnyUrl(f"http://127.0.0.1:{port}"), "runtime", Settings(), None)
    try:
        yield client
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


async def ask(client: RuntimeClient) -> bytes:
    answer = await client.send(_REQUEST)
    try:
        return b"".join([chunk async for chunk in answer.chunks()])
    finally:
        await answer.close()


async def test_a_connection_serves_one_request_after_the_other(runtime: Runtime, client: RuntimeClient) -> None:
    assert [await ask(client) for _ in range(3)] == [b"{}"] * 3
    assert [len(heads) for heads in runtime.heads] == [3]


async def test_connections_are_kept_however_many_there_are(runtime: Runtime, client: RuntimeClient) -> None:
    runtime.may_answer.clear()
    answers = [asyncio.create_task(ask(client)) for _ in range(20)]

    async def all_there() -> bool | None:
        return sum(map(len, runtime.heads)) == 20 or None

    await eventually(all_there)
    runtime.may_answer.set()
    assert await asyncio.gather(*answers) == [b"{}"] * 20
    assert await ask(client) == b"{}"
    assert sorted(len(heads) for heads in runtime.heads) == [1] * 19 + [2]


async def test_a_connection_that_the_runtime_has_closed_is_not_used(runtime: Runtime, client: RuntimeClient) -> None:
    runtime.closes = True
    for _ in range(3):
        assert await ask(client) == b"{}"
        # Until its end has come.
        await asyncio.sleep(0.02)
    assert [len(heads) for heads in runtime.heads] == [1, 1, 1]


async def test_an_answer_that_was_not_read_to_its_end_takes_its_connection_with_it(
    runtime: Runtime, client: RuntimeClient
) -> None:
    runtime.answer = _ANSWER.removesuffix(b"}")
    answer = await client.send(_REQUEST)
    await answer.close()
    runtime.answer = _ANSWER
    assert await ask(client) == b"{}"
    assert [len(heads) for heads in runtime.heads] == [1, 1]


async def test_a_request_that_is_cancelled_leaves_nothing_behind(runtime: Runtime, client: RuntimeClient) -> None:
    for turns in range(50):
        request = asyncio.create_task(ask(client))
        for _ in range(turns):
            await asyncio.sleep(0)
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            assert await request == b"{}"
    async with asyncio.timeout(5):
        # One is kept for the next request.
        while runtime.connected > 1:
            runtime.left.clear()
            await runtime.left.wait()


async def test_cookies_of_one_answer_are_not_sent_with_the_next_request(
    runtime: Runtime, client: RuntimeClient
) -> None:
    await ask(client)
    await ask(client)
    assert not any(b"cookie" in head for heads in runtime.heads for head in heads)


async def test_no_header_is_added_but_what_http_asks_for(runtime: Runtime, client: RuntimeClient) -> None:
    await ask(client)
    [[head]] = runtime.heads
    names = {line.partition(b":")[0] for line in head.split(b"\r\n")[1:] if line}
    assert names == {b"host", b"content-type", b"content-length"}


async def test_an_answer_that_cannot_be_decoded_is_a_failure(runtime: Runtime, client: RuntimeClient) -> None:
    runtime.answer = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}"
    with pytest.raises(RuntimeFailure) as caught:
        await client.get("/server_info", 5)
    assert caught.value.code == "runtime_died"


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for localhost that nobody knows, and its key."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


async def test_tls_is_spoken_with_a_runtime_whose_certificate_is_known(
    runtime: Runtime, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    server = await asyncio.start_server(runtime.serve, "127.0.0.1", 0, ssl=context)
    url = AnyUrl(f"https://localhost:{server.sockets[0].getsockname()[1]}")
    unknowing = RuntimeClient(url, "runtime", Settings(), None)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    knowing = RuntimeClient(url, "runtime", Settings(), None)
    try:
        assert [await ask(knowing) for _ in range(2)] == [b"{}"] * 2
        assert len(runtime.heads) == 1
        with pytest.raises(RuntimeFailure, match="certificate") as caught:
            await ask(unknowing)
        assert caught.value.code == "runtime_unavailable"
    finally:
        await knowing.close()
        await unknowing.close()
        server.close()
