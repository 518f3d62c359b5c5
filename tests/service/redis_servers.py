"""Real Redis servers: alone, watched by sentinels, or as a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.ports import free_port
from tests.service.waiting import eventually

# What our deployments run: nothing is acknowledged before it is on disk.
DURABLE = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")


@dataclass
class RedisServer:
    """A redis-server that can be killed and started again on the same port and folder."""

    folder: Path
    arguments: Sequence[str] = DURABLE
    password: str | None = None
    port: int = field(default_factory=free_port)
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        secret = ("--requirepass", self.password) if self.password else ()
        self.process = await asyncio.create_subprocess_exec(
            "redis-server",
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--loglevel", "warning"),
            *self.arguments,
            *secret,
            stdout=asyncio.subprocess.DEVNULL,
        )
        await self.answers()

    async def answers(self) -> None:
        async def ping() -> bool | None:
            try:
                async with self.client() as client:
                    return bool(await client.ping())
            except (RedisError, OSError):
                return None

        await eventually(ping, timeout_seconds=20)

    def client(self) -> Redis:
        return Redis(host="127.0.0.1", port=self.port, password=self.password, decode_responses=True)

    async def kill(self) -> None:
        assert self.process is not None
        await self.end(self.process, signal.SIGKILL)

    async def stop(self) -> None:
        if self.process is not None:
            await self.end(self.process, signal.SIGTERM)

    async def end(self, process: asyncio.subprocess.Process, how: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(how)
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()
        self.process = None


@contextlib.asynccontextmanager
async def redis_server(
    folder: Path, arguments: Sequence[str] = DURABLE, password: str | None = None
) -> AsyncIterator[RedisServer]:
    """A running server; its data are in ``folder``."""
    server = RedisServer(folder, arguments, password)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
