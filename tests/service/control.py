"""Services with a store, and clients that have keys."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import AnyUrl, SecretStr

from tests.ports import free_port
from tests.service.fake_runtime import FakeRuntime
from tests.service.servers import serving
from tests.service.waiting import eventually
from winnow_service.app import create_app
from winnow_service.settings import Settings

SERVE = (sys.executable, "-m", "winnow_service.cli.serve")
ADMIN_KEY = secrets.token_urlsafe(32)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@contextlib.asynccontextmanager
async def replica(
    store_url: str,
    runtime_url: str = "http://127.0.0.1:9",
    *,
    may_be_open: bool = True,
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """A service on that store; yields a client without a key."""
    given = Settings(
        store_url=SecretStr(store_url),
        runtime_url=AnyUrl(runtime_url),
        **{"readiness_interval_seconds": 0.05, **settings},
    )
    async with (
        serving(create_app(given, may_be_open=may_be_open), free_port(), grace_seconds=1) as address,
        httpx.AsyncClient(base_url=address, timeout=20, limits=httpx.Limits(max_connections=None)) as client,
    ):
        yield client


@contextlib.asynccontextmanager
async def runtime() -> AsyncIterator[tuple[FakeRuntime, str]]:
    """A runtime that runs, and its address."""
    fake = FakeRuntime()
    async with serving(fake.app(), free_port(), grace_seconds=1) as address:
        yield fake, address


async def make_key(client: httpx.AsyncClient, admin_key: str = ADMIN_KEY, **settings: Any) -> dict[str, Any]:
    """Make a key and return it as it was shown; a store that a busy machine keeps waiting is asked again."""
    body = {"name": "test", "scopes": ["infer"], **settings}

    async def made() -> httpx.Response | None:
        answer = await client.post("/v1/keys", json=body, headers=bearer(admin_key))
        return None if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE else answer

    answer = await eventually(made)
    assert answer.status_code == 201, answer.text
    key: dict[str, Any] = answer.json()
    return key


@dataclass(frozen=True)
class Service:
    """A running ``winnow serve``, and a client of it without a key."""

    client: httpx.AsyncClient
    process: asyncio.subprocess.Process


@contextlib.asynccontextmanager
async def processes(
    store_url: str, folder: Path, runtime_url: str = "http://127.0.0.1:9", number: int = 2
) -> AsyncIterator[list[Service]]:
    """Services as processes of their own, on one store."""
    environment = {
        **os.environ,
        "WINNOW_STORE_URL": store_url,
        "WINNOW_ADMIN_KEY": ADMIN_KEY,
        "WINNOW_RUNTIME_URL": runtime_url,
    }
    async with contextlib.AsyncExitStack() as stack:
        services = []
        for _ in range(number):
            port = free_port()
            process = await asyncio.create_subprocess_exec(
                *(*SERVE, "--port", str(port)), cwd=folder, env=environment, stderr=asyncio.subprocess.DEVNULL
            )
            stack.push_async_callback(_end, process)
            # The service closes a connection that was idle for 5 seconds: none is used again that late.
            limits = httpx.Limits(max_connections=50, keepalive_expiry=1)
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, limits=limits)
            services.append(Service(await stack.enter_async_context(client), process))

            async def answers(client: httpx.AsyncClient = client) -> bool | None:
                try:
                    return (await client.get("/healthz")).status_code == 200
                except httpx.TransportError:
                    return None

            await eventually(answers, timeout_seconds=30)
        yield services


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        await process.wait()


async def known(clients: list[httpx.AsyncClient], key: dict[str, str]) -> bool | None:
    """Whether both services know the key."""
    answers = [await client.get("/v1/models", headers=key) for client in clients]
    return all(answer.status_code == 200 for answer in answers) or None
