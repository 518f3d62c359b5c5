"""The fake runtime as a process of its own, which can be killed, stopped and started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.ports import free_port
from tests.service.waiting import eventually

ROOT = Path(__file__).parents[2]
_SERVE = """
import json, sys, uvicorn
from tests.service.fake_runtime import FakeRuntime
uvicorn.run(FakeRuntime(**json.loads(sys.argv[2])).app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")
"""


@dataclass
class RuntimeProcess:
    """A runtime that runs, unless it has been killed.

    Attributes:
        options: of its ``FakeRuntime``.
    """

    port: int = field(default_factory=free_port)
    options: dict[str, Any] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _SERVE, str(self.port), json.dumps(self.options)), cwd=ROOT
        )

        async def answers() -> bool | None:
            with contextlib.suppress(httpx.TransportError):
                return (await client.get("/health")).status_code == 200
            return None

        async with httpx.AsyncClient(base_url=self.address) as client:
            await eventually(answers, timeout_seconds=30)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@contextlib.asynccontextmanager
async def runtime_process(**options: Any) -> AsyncIterator[RuntimeProcess]:
    """A fake runtime that runs."""
    runtime = RuntimeProcess(options=options)
    try:
        await runtime.start()
        yield runtime
    finally:
        await runtime.kill()
