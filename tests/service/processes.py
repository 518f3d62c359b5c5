"""``winnow`` as a process, watched line by line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

WINNOW = (sys.executable, "-c", "from winnow_service.cli.main import app; app()")


@dataclass
class Winnow:
    """A running ``winnow`` command."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)

    async def line_with(self, text: str, timeout_seconds: float = 60) -> str:
        """Read on until a line holds ``text``."""
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_seconds):
            while raw := await self.process.stdout.readline():
                self.lines.append(raw.decode().rstrip())
                if text in self.lines[-1]:
                    return self.lines[-1]
        raise AssertionError(f"ended without {text!r}: {self.lines}")

    async def end(self, timeout_seconds: float = 60) -> int:
        """Read to the end, and return the exit status."""
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_seconds):
            while raw := await self.process.stdout.readline():
                self.lines.append(raw.decode().rstrip())
            return await self.process.wait()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)


@contextlib.asynccontextmanager
async def winnow(
    arguments: Sequence[str], cwd: Path, environment: dict[str, str] | None = None
) -> AsyncIterator[Winnow]:
    """Start ``winnow`` in ``cwd``; kills it at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *WINNOW,
        *arguments,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=2**22,
    )
    try:
        yield Winnow(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()


def alive(pid: int) -> bool:
    """Whether a process runs: one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descendants(pid: int) -> set[int]:
    """All processes below ``pid`` now."""
    parents: dict[int, int] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    new = {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found
