"""What a real service does when it is told to end: SIGTERM, with streams running."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.control import ADMIN_KEY, Service, bearer, processes, runtime
from tests.service.fake_runtime import FakeRuntime
from tests.service.test_streaming import events
from tests.service.waiting import eventually

ADMIN = bearer(ADMIN_KEY)
GATED: dict[str, Any] = {"stream": True, "fake": {"gated": True, "chunks": 2}}


@contextlib.asynccontextmanager
async def service_and_runtime(folder: Path) -> AsyncIterator[tuple[Service, FakeRuntime]]:
    async with (
        runtime() as (fake, address),
        processes(f"sqlite:///{folder}/control.db", folder, address, number=1) as [service],
    ):

        async def ready() -> bool | None:
            return (await service.client.get("/readyz")).status_code == 200 or None

        await eventually(ready)
        yield service, fake


async def draining(service: Service) -> dict[str, Any]:
    async def look() -> dict[str, Any] | None:
        answer = await service.client.get("/readyz")
        state: dict[str, Any] = answer.json()
        return state if answer.status_code == 503 and state["draining"] else None

    return await eventually(look)


async def test_running_streams_finish_and_new_requests_go_elsewhere(tmp_path: Path) -> None:
    async with service_and_runtime(tmp_path) as (service, fake):
        fake.gate.release()
        async with (
            httpx.AsyncClient(base_url=service.client.base_url, headers=ADMIN, timeout=20) as kept,
            service.client.stream("POST", "/generate", json=GATED, headers=ADMIN) as stream,
        ):
            assert (await kept.get("/v1/models")).status_code == 200
            chunks = stream.aiter_text()
            received = await anext(chunks)
            service.process.send_signal(signal.SIGTERM)
            assert (await draining(service))["reason"] == "The service is about to end."

            for client in (kept, service.client):
                for method, path in (("POST", "/generate"), ("GET", "/v1/models"), ("GET", "/v1/policies")):
                    refused = await client.request(method, path, headers=ADMIN)
                    assert refused.status_code == 503
                    assert refused.json()["error"]["code"] == "draining"
                    assert refused.headers["connection"] == "close"
                    assert refused.headers["retry-after"]
            metrics = (await service.client.get("/metrics", headers=ADMIN)).text
            assert "winnow_draining 1.0" in metrics
            assert 'winnow_refusals_total{code="draining"} 6.0' in metrics
            assert (await service.client.get("/healthz")).status_code == 200

            assert service.process.returncode is None
            fake.gate.release()
            received += "".join([chunk async for chunk in chunks])
        assert [event if event == "[DONE]" else event["index"] for event in events(received)] == [0, 1, "[DONE]"]
        # Connections that are kept alive do not hold it up.
        assert await asyncio.wait_for(service.process.wait(), 5) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_with_nothing_to_do_it_ends_at_once(tmp_path: Path, number: signal.Signals) -> None:
    async with service_and_runtime(tmp_path) as (service, _):
        service.process.send_signal(number)
        assert await asyncio.wait_for(service.process.wait(), 5) == 0


async def test_who_waits_in_the_queue_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINNOW_MAX_RUNNING", "1")
    async with service_and_runtime(tmp_path) as (service, fake):

        async def ask() -> httpx.Response:
            return await service.client.post("/generate", json=GATED, headers=ADMIN)

        running = asyncio.create_task(ask())
        await asyncio.wait_for(fake.answering.wait(), 5)
        waiting = asyncio.create_task(ask())

        async def waits() -> bool | None:
            return "winnow_queued_requests 1.0" in (await service.client.get("/metrics", headers=ADMIN)).text or None

        await eventually(waits)
        service.process.send_signal(signal.SIGTERM)
        refused = await asyncio.wait_for(waiting, 5)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        fake.gate.release()
        fake.gate.release()
        assert (await running).text.endswith("data: [DONE]\n\n")
        assert await asyncio.wait_for(service.process.wait(), 5) == 0
    assert len(fake.asked) == 1


@pytest.mark.parametrize("how", ["time-out", "second signal"])
async def test_streams_that_do_not_end_are_cut_off(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINNOW_DRAIN_TIMEOUT_SECONDS", "0.5" if how == "time-out" else "60")
    async with service_and_runtime(tmp_path) as (service, fake):
        fake.gate.release()
        async with service.client.stream("POST", "/generate", json=GATED, headers=ADMIN) as stream:
            chunks = stream.aiter_text()
            await anext(chunks)
            service.process.send_signal(signal.SIGTERM)
            await draining(service)
            if how == "second signal":
                service.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(chunks)
        assert await asyncio.wait_for(service.process.wait(), 8) == 0
        await asyncio.wait_for(fake.aborted.wait(), 5)
