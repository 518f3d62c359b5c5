"""One program that the supervisor started, with its log."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

# A line longer than this is passed on in pieces.
_LONGEST_LINE_BYTES = 64 * 1024
_TAIL_LINES = 30
# How the plugin begins the sentence that says why a server does not start. SGLang's stack traces follow it.
_REFUSAL = "Winnow: the server does not start, because "
# What a guard needs to kill processes that cannot refuse.
_KILL_SECONDS = 10.0
_LOG_SECONDS = 2.0


@dataclass(frozen=True)
class Program:
    """What to start. ``environment`` is added to the supervisor's own."""

    name: str
    command: list[str]
    ready_url: str
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A running program behind its guard. In a session of its own: a terminal's Ctrl-C reaches the supervisor only.

    Attributes:
        tail: the last lines of its log.
        refusal: the sentence with which Winnow's plugin refused to start, if it has.
    """

    def __init__(
        self,
        program: Program,
        process: asyncio.subprocess.Process,
        log: asyncio.StreamReader,
        on_line: Callable[[str, str], None],
    ) -> None:
        self.program = program
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.refusal: str | None = None
        self._process = process
        self._on_line = on_line
        self._log = asyncio.create_task(self._read_log(log))
        self._ended = asyncio.create_task(process.wait())

    @classmethod
    async def start(cls, program: Program, on_line: Callable[[str, str], None]) -> Child:
        """Start ``program``; ``on_line`` gets its name and each line that it writes."""
        # With a pipe of asyncio's own, its wait() would last until the pipe is closed by all who hold it.
        log_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "winnow_service.supervisor.guard", *program.command),
                stdin=asyncio.subprocess.PIPE,
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **program.environment},
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        log = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(log), os.fdopen(log_end, "rb")
        )
        return cls(program, process, log, on_line)

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait until the program and all that it started have ended; return its exit status.

        Raises what ``on_line`` raised: a log that nobody reads would block the program.
        """
        both: set[asyncio.Task[int] | asyncio.Task[None]] = {self._ended, self._log}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if self._log.done():
            self._log.result()
        await asyncio.wait({self._ended})
        # Should the guard have been killed, what it leaves behind may hold the log open.
        await asyncio.wait({self._log}, timeout=_LOG_SECONDS)
        return self._ended.result()

    async def stop(self, grace_seconds: float) -> None:
        """Ask it to end, and kill it and all that it started if it has not after ``grace_seconds``."""
        if self.running:
            self._process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), grace_seconds)
            return
        await self.kill()

    async def kill(self) -> None:
        """Kill it and all that it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self.wait(), _KILL_SECONDS)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def _read_log(self, log: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await log.read(_LONGEST_LINE_BYTES):
            # Progress bars end their lines with a carriage return.
            *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            if len(rest) > _LONGEST_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._take(line)
        if rest:
            self._take(rest)

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self.tail.append(text)
            if self.refusal is None and text.startswith(_REFUSAL):
                self.refusal = text.removeprefix("Winnow: ")
            self._on_line(self.program.name, text)
