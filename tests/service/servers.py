"""Real servers on free ports, in the event loop of the test, so that a test can await what happens inside them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.told_to_stop = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as error:
            # It would end the event loop, and with it every later test of the process.
            raise RuntimeError(f"nothing listens on port {self.config.port}") from error
        self.listening.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.told_to_stop.wait()


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, port: int, grace_seconds: int = 5, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve ``app``; yields its address. At the end connections still open are cut after ``grace_seconds``."""
    config = uvicorn.Config(
        app, host=host, port=port, log_config=None, access_log=False, timeout_graceful_shutdown=grace_seconds
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve())
    started = asyncio.create_task(server.listening.wait())
    await asyncio.wait({running, started}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
        raise RuntimeError("the server ended before it listened")
    try:
        yield f"http://{host}:{port}"
    finally:
        server.told_to_stop.set()
        await running
