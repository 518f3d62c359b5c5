"""Ports for the servers that tests start."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from functools import cache
from itertools import cycle, islice

# Below the ports that Linux gives to clients' ends of connections: no connection takes one before its server does.
FIRST = 12_000
PER_PROCESS = 4000


def free_port() -> int:
    """Return a port that nothing listens on; processes that run tests side by side draw from ranges of their own.

    What has been returned comes again only when all others have: its server may not listen yet.
    """
    for port in islice(_ports(), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("none of 100 ports is free")


@cache
def _ports() -> Iterator[int]:
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = FIRST + PER_PROCESS * (process % 5)
    return cycle(random.Random().sample(range(first, first + PER_PROCESS), PER_PROCESS))
