"""The service in front of a fake runtime, both on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from pydantic import AnyHttpUrl, SecretStr

from tests.ports import free_port
from tests.service.fake_runtime import FakeRuntime
from tests.service.servers import serving
from winnow_service.app import create_app
from winnow_service.settings import Settings

BODY_LIMIT_BYTES = 2 * 1024 * 1024
SILENCE_SECONDS = 3.0


@dataclass(frozen=True)
class Deployment:
    """A running service. ``start_runtime`` and ``stop_runtime`` use one port again and again."""

    client: httpx.AsyncClient
    runtime: FakeRuntime
    start_runtime: Callable[[], Awaitable[None]]
    stop_runtime: Callable[[], Awaitable[None]]


@pytest.fixture
def silence_seconds() -> float:
    """How long the service waits for a runtime's first token, and for the next."""
    return SILENCE_SECONDS


@pytest_asyncio.fixture
async def deployment(tmp_path: Path, silence_seconds: float) -> AsyncIterator[Deployment]:
    """A service whose runtime has not been started."""
    runtime = FakeRuntime()
    runtime_port = free_port()
    server = None

    async def start() -> None:
        nonlocal server
        server = serving(runtime.app(), runtime_port, grace_seconds=1)
        await server.__aenter__()

    async def stop() -> None:
        nonlocal server
        if server is not None:
            stopping, server = server, None
            await stopping.__aexit__(None, None, None)

    settings = Settings(
        runtime_url=AnyHttpUrl(f"http://127.0.0.1:{runtime_port}"),
        max_body_bytes=BODY_LIMIT_BYTES,
        first_token_timeout_seconds=silence_seconds,
        runtime_silence_timeout_seconds=silence_seconds,
        readiness_interval_seconds=0.02,
        store_url=SecretStr(f"sqlite:///{tmp_path}/control.db"),
    )
    async with (
        serving(create_app(settings, may_be_open=True), free_port(), grace_seconds=1) as address,
        httpx.AsyncClient(base_url=address, timeout=20, limits=httpx.Limits(max_connections=None)) as client,
    ):
        try:
            yield Deployment(client, runtime, start, stop)
        finally:
            await stop()


@pytest_asyncio.fixture
async def service(deployment: Deployment) -> Deployment:
    """A service whose runtime runs."""
    await deployment.start_runtime()
    return deployment
