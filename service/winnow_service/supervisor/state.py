"""The state file, by which ``winnow down`` finds a running ``winnow up``.

``winnow up`` holds a lock on the file for as long as it lives, and the kernel drops the lock however it ends: a file
without a lock is stale, and a process id in it that now belongs to another program is never signalled.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel

STATE_FILE = "up.json"
_POLL_SECONDS = 0.1


class State(BaseModel):
    """What a running ``winnow up`` says of itself."""

    pid: int
    address: str
    runtime_address: str


class AlreadyRunning(Exception):
    """Another ``winnow up`` holds the state file."""

    def __init__(self, state: State | None) -> None:
        super().__init__("already running")
        self.state = state


@contextmanager
def held(directory: Path, state: State) -> Iterator[None]:
    """Hold the state file of ``directory``, with ``state`` in it.

    Raises:
        AlreadyRunning: another process holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / STATE_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _lock(descriptor):
            raise AlreadyRunning(_read(path))
        _write(descriptor, state.model_dump_json() + "\n")
        try:
            yield
        finally:
            # Emptied, not removed: another process may have opened it to take the lock next.
            _write(descriptor, "")
    finally:
        os.close(descriptor)


def running(directory: Path) -> State | None:
    """The state of the ``winnow up`` that runs with ``directory``, if one does."""
    path = directory / STATE_FILE
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        return None if _lock(descriptor) else _read(path)
    finally:
        os.close(descriptor)


def wait_until_ended(directory: Path, timeout_seconds: float) -> bool:
    """Wait until no ``winnow up`` runs with ``directory``; False if one still does after ``timeout_seconds``."""
    deadline = time.monotonic() + timeout_seconds
    while running(directory) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path) -> State | None:
    text = path.read_text()
    return State.model_validate_json(text) if text else None


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
