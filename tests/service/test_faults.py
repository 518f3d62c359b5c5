"""Runtimes, clients and services that fail as processes and machines do: killed, hung, stopped, gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.control import ADMIN_KEY, Service, bearer, processes, replica, runtime
from tests.service.runtime_process import RuntimeProcess, runtime_process
from tests.service.test_forwarding import Samples, key, samples
from tests.service.test_streaming import events
from tests.service.waiting import eventually

ADMIN = bearer(ADMIN_KEY)
SETTINGS = {
    "WINNOW_FIRST_TOKEN_TIMEOUT_SECONDS": "1",
    "WINNOW_RUNTIME_SILENCE_TIMEOUT_SECONDS": "1",
    "WINNOW_READINESS_INTERVAL_SECONDS": "0.1",
    "WINNOW_READINESS_TIMEOUT_SECONDS": "1",
    "WINNOW_BREAKER_OPEN_SECONDS": "1",
    "WINNOW_METRICS_PUBLIC": "true",
}
# Of one event, and how much memory the service may take when clients do not read.
PAD_BYTES = 64 * 1024
SLOW_CLIENTS = 8
MAX_GROWTH_BYTES = 64 * 1024 * 1024


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)


@contextlib.asynccontextmanager
async def deployed(folder: Path) -> AsyncIterator[tuple[Service, RuntimeProcess]]:
    """Service and runtime, each a process."""
    async with (
        runtime_process() as runtime,
        processes(f"sqlite:///{folder}/control.db", folder, runtime.address, number=1) as [service],
    ):
        await until_ready(service, True)
        yield service, runtime


async def until_ready(service: Service, wanted: bool) -> dict[str, Any]:
    async def look() -> dict[str, Any] | None:
        state: dict[str, Any] = (await service.client.get("/readyz")).json()
        return state if state["ready"] is wanted else None

    return await eventually(look, timeout_seconds=15)


async def until_nothing_runs(service: Service) -> Samples:
    async def look() -> Samples | None:
        found = await samples(service.client)
        return found if found[key("winnow_admitted_requests")] == 0 else None

    return await eventually(look, timeout_seconds=15)


async def stream(service: Service, **fake: Any) -> list[Any]:
    answer = await service.client.post("/generate", json={"stream": True, "fake": fake}, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return events(answer.text)


async def test_a_runtime_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    async with deployed(tmp_path) as (service, runtime):
        streams = [asyncio.create_task(stream(service, chunks=1000, pause=0.05)) for _ in range(5)]
        await asyncio.sleep(0.5)
        await runtime.kill()
        for answer in await asyncio.gather(*streams):
            assert len(answer) > 1
            assert answer[-1]["error"]["code"] == "runtime_died"
        await until_ready(service, False)
        # Five failures have opened the breaker: nobody waits for a connection.
        refused = await service.client.post("/generate", json={}, headers=ADMIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "circuit_open")
        assert refused.headers["retry-after"]

        await runtime.start()
        await until_ready(service, True)
        # The runtime was seen to be ready: no time is waited out.
        assert (await stream(service))[-1] == "[DONE]"
        found = await until_nothing_runs(service)
        assert found[key("winnow_runtime_breaker_state", runtime=f"127.0.0.1:{runtime.port}", state="closed")] == 1
        assert found[key("winnow_runtime_errors_total", kind="runtime_died")] == 5


async def test_a_runtime_that_hangs(tmp_path: Path) -> None:
    async with deployed(tmp_path) as (service, runtime):
        running = [asyncio.create_task(stream(service, chunks=1000, pause=0.05)) for _ in range(3)]
        await asyncio.sleep(0.5)
        # The kernel goes on taking connections for it.
        runtime.send(signal.SIGSTOP)
        begun = asyncio.create_task(service.client.post("/generate", json={"stream": True}, headers=ADMIN))
        for answer in await asyncio.gather(*running):
            assert answer[-1]["error"]["code"] == "runtime_timeout"
        assert (await begun).json()["error"]["code"] == "first_token_timeout"
        assert (await begun).status_code == 504
        assert "sent nothing for 1 seconds" in (await until_ready(service, False))["reason"]
        found = await samples(service.client)
        assert found[key("winnow_admitted_requests")] == 0

        runtime.send(signal.SIGCONT)
        await until_ready(service, True)
        assert (await stream(service))[-1] == "[DONE]"


async def test_a_client_that_is_gone_frees_the_runtime(tmp_path: Path) -> None:
    async with (
        runtime() as (fake, address),
        processes(f"sqlite:///{tmp_path}/control.db", tmp_path, address, number=1) as [service],
    ):
        for _ in range(3):
            fake.aborted.clear()
            body = {"stream": True, "fake": {"chunks": 10_000, "pause": 0.01}}
            async with service.client.stream("POST", "/generate", json=body, headers=ADMIN) as answer:
                await anext(answer.aiter_raw())
            await asyncio.wait_for(fake.aborted.wait(), 5)
        found = await until_nothing_runs(service)
        assert found[key("winnow_client_disconnects_total", route="/generate")] == 3


def connect_and_ask(service: Service, body: dict[str, Any]) -> socket.socket:
    """Send a request, and read nothing of the answer."""
    url = service.client.base_url
    content = json.dumps(body).encode()
    fields = ["Host: x", f"Authorization: Bearer {ADMIN_KEY}", f"Content-Length: {len(content)}"]
    head = "\r\n".join(["POST /generate HTTP/1.1", *fields, "", ""])
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((url.host, url.port))
    client.sendall(head.encode() + content)
    return client


async def test_clients_that_do_not_read_take_no_memory_and_hold_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINNOW_CLIENT_STALL_TIMEOUT_SECONDS", "5")
    monkeypatch.setenv("WINNOW_FIRST_TOKEN_TIMEOUT_SECONDS", "20")
    monkeypatch.setenv("WINNOW_RUNTIME_SILENCE_TIMEOUT_SECONDS", "20")
    async with deployed(tmp_path) as (service, _):
        assert (await stream(service))[-1] == "[DONE]"

        async def memory() -> float:
            return (await samples(service.client))[key("winnow_process_resident_memory_bytes")]

        async def files() -> float:
            return (await samples(service.client))[key("winnow_process_open_fds")]

        before, open_before = await memory(), await files()
        # 640 MB, if anybody kept it.
        body = {"stream": True, "fake": {"chunks": 10_000, "pad": PAD_BYTES}}
        with contextlib.ExitStack() as stack:
            for _ in range(SLOW_CLIENTS):
                stack.enter_context(connect_and_ask(service, body))

            async def all_there() -> bool | None:
                return (await samples(service.client))[key("winnow_admitted_requests")] == SLOW_CLIENTS or None

            await eventually(all_there)
            for _ in range(10):
                assert (await stream(service))[-1] == "[DONE]"
                assert await memory() - before < MAX_GROWTH_BYTES
                await asyncio.sleep(0.1)
            # Their places are for others.
            found = await until_nothing_runs(service)

            async def closed() -> bool | None:
                return await files() < open_before + SLOW_CLIENTS / 2 or None

            # Though they are still there.
            await eventually(closed, timeout_seconds=30)
        assert found[key("winnow_client_disconnects_total", route="/generate")] == SLOW_CLIENTS


async def test_a_client_that_reads_slowly_gets_everything(tmp_path: Path) -> None:
    async with runtime() as (_, address), replica(f"sqlite:///{tmp_path}/c.db", address) as client:
        body = {"stream": True, "fake": {"chunks": 40, "pad": PAD_BYTES}}
        received = b""
        async with client.stream("POST", "/generate", json=body) as answer:
            async for chunk in answer.aiter_raw():
                received += chunk
                await asyncio.sleep(0.01)
        assert len(events(received.decode())) == 41


async def test_an_answer_ends_when_it_takes_too_long(tmp_path: Path) -> None:
    async with (
        runtime() as (fake, address),
        replica(f"sqlite:///{tmp_path}/c.db", address, request_timeout_seconds=1.0, breaker_failures=1) as client,
    ):
        body = {"stream": True, "fake": {"chunks": 1000, "pause": 0.1}}
        *received, last = events((await client.post("/generate", json=body)).text)
        assert 5 <= len(received) <= 11
        assert last["error"]["code"] == "request_timeout"
        await asyncio.wait_for(fake.aborted.wait(), 5)
        whole = await client.post("/v1/completions", json={"fake": {"hang": True}})
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "request_timeout")
        assert (await samples(client))[key("winnow_runtime_errors_total", kind="request_timeout")] == 2
        # That was long, and no fault of the runtime's.
        assert (await client.post("/generate", json={})).status_code == 200


async def test_heads_that_are_too_long_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINNOW_MAX_HEADER_BYTES", "8192")
    async with deployed(tmp_path) as (service, _):
        for size, status in ((4000, 200), (9000, 431)):
            headers = {**ADMIN, "x-long": "x" * size}
            assert (await service.client.post("/generate", json={}, headers=headers)).status_code == status
        assert (await service.client.get("/generate?" + "x" * 9000)).json()["error"]["code"] == "headers_too_large"
        assert (await samples(service.client))[key("winnow_refusals_total", code="headers_too_large")] == 2
        reader, writer = await asyncio.open_connection(service.client.base_url.host, service.client.base_url.port)
        # One without an end is not waited for.
        writer.write(b"GET /healthz HTTP/1.1\r\nx-long: " + b"x" * 9000)
        assert b" 400 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()
        assert (await service.client.get("/healthz")).status_code == 200


async def test_a_stalled_request_body_holds_no_place(tmp_path: Path) -> None:
    async with runtime() as (_, address), replica(f"sqlite:///{tmp_path}/c.db", address, max_running=1) as client:
        with socket.socket() as slow:
            slow.connect((client.base_url.host, client.base_url.port))
            slow.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/generate", json={"fake": {"hang": True}}, timeout=0.2)
            assert (await client.post("/generate", json={}, timeout=5)).status_code == 200
