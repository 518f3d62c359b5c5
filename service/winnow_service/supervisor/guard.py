"""A small process between ``winnow up`` and a program it starts, so that no exit path leaves a process behind.

``python -m winnow_service.supervisor.guard COMMAND...`` runs COMMAND and exits as it did (128 + signal if by a signal).

- Its standard input is a pipe that the supervisor holds. When the pipe closes, because the supervisor closed it or was
  killed, the guard kills everything.
- SIGTERM and SIGINT are passed on to COMMAND as SIGTERM.
- On Linux it adopts every orphan below it, so that "no children left" means that nothing is left. Elsewhere it can only
  signal the process group.
- If the guard itself is killed, so is COMMAND, and the supervisor adopts the rest.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from contextlib import suppress

from winnow_service.supervisor.orphans import adopt_orphans, children, die_with_parent, kill_children


def main(command: list[str]) -> int:
    """Run ``command`` to its end, leave nothing of it behind, and return its exit status."""
    adopt_orphans()
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    # preexec_fn is unsafe beside threads, and the guard has none.
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)  # noqa: PLW1509
    status = _wait(program, woken)
    kill_children()
    if sys.platform != "linux":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    return 128 - status if status < 0 else status


def _wait(program: subprocess.Popen[bytes], woken: int) -> int:
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = os.read(key.fd, 512)
                if key.fd == sys.stdin.fileno() and not data:
                    program.kill()
                    selector.unregister(key.fd)
                if key.fd == woken and not {signal.SIGTERM, signal.SIGINT}.isdisjoint(data):
                    program.terminate()
            status = program.poll()
            if status is not None:
                return status
            _collect_adopted(program.pid)


def _collect_adopted(program: int) -> None:
    """Collect adopted processes that have ended, but leave ``program`` to its Popen."""
    for child in children():
        if child != program:
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
