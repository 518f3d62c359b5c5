"""The service and the stand-in as processes on cores of their own, and what they take."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from benchmarks.serving.overhead.standin import HOST
from tests.ports import free_port

_READY_SECONDS: Final = 60.0
_PINNED: Final = (
    "import os, sys; os.sched_setaffinity(0, {core}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


@dataclass(frozen=True)
class Running:
    """A process that serves at ``address``."""

    pid: int
    address: str

    def cpu_seconds(self) -> float:
        """What all its threads have computed, in user and system mode, by /proc."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Its memory in RAM."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Pair:
    """The stand-in, and the service in front of it.

    Attributes:
        admin_key: of the service.
    """

    standin: Running
    service: Running
    admin_key: str


def cores() -> tuple[int, int]:
    """One core for the service, and one for all else: the same if there is no other."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[-1]


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[Pair]:
    """Start both; the service alone on its core."""
    own, others = cores()
    admin_key = secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory() as folder:
        async with contextlib.AsyncExitStack() as stack:
            port = free_port()
            program = ["-m", "benchmarks.serving.overhead.standin", "--port", str(port)]
            standin = await stack.enter_async_context(_process(program, {}, others, port, "/health", Path(folder)))
            environment = {
                "WINNOW_RUNTIME_URL": standin.address,
                "WINNOW_STORE_URL": f"sqlite:///{folder}/control.db",
                "WINNOW_ADMIN_KEY": admin_key,
                "WINNOW_METRICS_PUBLIC": "true",
            }
            port = free_port()
            program = ["-m", "winnow_service.cli.serve", "--port", str(port)]
            service = await stack.enter_async_context(
                _process(program, environment, own, port, "/readyz", Path(folder))
            )
            yield Pair(standin, service, admin_key)


@contextlib.asynccontextmanager
async def _process(
    program: list[str], environment: Mapping[str, str], core: int, port: int, ready_path: str, folder: Path
) -> AsyncIterator[Running]:
    # Its log goes where a log goes, so that writing it counts.
    with (folder / f"{port}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PINNED.format(core={core}), *program),
            env={**os.environ, **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    running = Running(process.pid, f"http://{HOST}:{port}")
    try:
        await _until_ready(process, running.address + ready_path, folder / f"{port}.log")
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def _until_ready(process: asyncio.subprocess.Process, url: str, log: Path) -> None:
    async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(_READY_SECONDS):
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"it ended: {_tail(log)}")
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(url)).status_code == 200:
                    return
            await asyncio.sleep(0.05)


def _tail(log: Path) -> str:
    return log.read_text()[-2000:]
