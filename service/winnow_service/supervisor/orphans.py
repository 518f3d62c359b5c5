"""Finding and ending processes whose parents have died. Only Linux can; elsewhere these functions do nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ON_LINUX = sys.platform == "linux"


def adopt_orphans() -> None:
    """From now on, a process below this one whose parent dies becomes a child of this one."""
    if _ON_LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if _ON_LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def children() -> list[int]:
    """The processes whose parent is this one, those that have ended but were not collected included."""
    if not _ON_LINUX:
        return []
    return [int(pid.name) for pid in Path("/proc").iterdir() if pid.name.isdecimal() and _parent(pid) == os.getpid()]


def kill_children() -> None:
    """Kill and collect all children, and if orphans are adopted, all that they started."""
    # Each round's deaths can hand over orphans of their own.
    while pids := children():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _parent(process: Path) -> int | None:
    try:
        # The name, in parentheses, may hold anything; state and parent follow its end.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
