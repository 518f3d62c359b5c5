"""The queue before the runtimes: how many requests run, how many wait, and whose turn it is.

When a request ends, the key with the fewest running requests is next; among equals the one that has waited longest for
its turn. So keys that ask for more than there is end up with equal shares, whatever the lengths of their requests.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from winnow_service.errors import ServiceError

# Retry-After is estimated from so many requests that ended last, within these bounds.
_REMEMBERED_ENDS: Final = 32
_RETRY_SECONDS: Final = (1, 60)


@dataclass(frozen=True)
class QueueBounds:
    """How many requests may wait, in all and of one key, and how long."""

    waiting: int
    waiting_per_key: int
    seconds: float


class AdmissionQueue:
    """Lets through as many requests at once as ``capacity`` says; others wait, within ``bounds``.

    Args:
        capacity: how many requests may run now. When it has grown, ``admit_waiting`` must be called.
        waited: called for each request that is let through, with the seconds that it has waited.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        bounds: QueueBounds,
        capacity: Callable[[], int],
        waited: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bounds = bounds
        self._capacity = capacity
        self._waited = waited
        self._clock = clock
        self._waiting: dict[str | None, dict[QueueTicket, None]] = {}
        self._running: Counter[str | None] = Counter()
        self._ends: deque[float] = deque(maxlen=_REMEMBERED_ENDS)
        self._closed = False
        self.waiting = 0
        self.running = 0

    def join(self, key: str | None) -> QueueTicket:
        """Take a ticket, which must be left, whatever happens.

        Args:
            key: whose turns these are. None is nobody's: all of these share turns, and one bound.

        Raises:
            ServiceError: there is none.
        """
        if self._closed:
            raise ServiceError("draining")
        self.admit_waiting()
        ticket = QueueTicket(self, key, self._clock())
        if self.running < self._capacity():
            self._run(ticket)
            return ticket
        waiting = len(self._waiting.get(key, ()))
        if key is not None and waiting >= self._bounds.waiting_per_key:
            raise ServiceError("key_queue_full", waiting=waiting, retry_seconds=self._retry_seconds(waiting))
        if self.waiting >= self._bounds.waiting:
            raise ServiceError("queue_full", waiting=self.waiting, retry_seconds=self._retry_seconds(self.waiting))
        self._waiting.setdefault(key, {})[ticket] = None
        self.waiting += 1
        return ticket

    def admit_waiting(self) -> None:
        """Let through as many as may run now."""
        while self.waiting and self.running < self._capacity():
            key = min(self._waiting, key=lambda key: self._running[key])
            ticket = next(iter(self._waiting[key]))
            self._remove(ticket)
            if key in self._waiting:
                # It had its turn: behind its equals.
                self._waiting[key] = self._waiting.pop(key)
            self._run(ticket)

    def close(self) -> None:
        """Refuse those who wait and those who come; those who run are left alone."""
        self._closed = True
        for ticket in [ticket for tickets in self._waiting.values() for ticket in tickets]:
            self._remove(ticket)
            ticket.end_wait()

    async def wait(self, ticket: QueueTicket) -> None:
        """Wait until ``ticket`` runs. Raises as ``QueueTicket.turn``."""
        try:
            async with asyncio.timeout(self._bounds.seconds):
                await ticket.waited
        except TimeoutError:
            retry_seconds = self._retry_seconds(self.waiting)
            raise ServiceError("queue_timeout", seconds=self._bounds.seconds, retry_seconds=retry_seconds) from None
        if not ticket.runs:
            raise ServiceError("draining")

    def leave(self, ticket: QueueTicket) -> None:
        """Give up ``ticket``, whether it waits or runs."""
        if ticket.runs:
            self.running -= 1
            self._running[ticket.key] -= 1
            if not self._running[ticket.key]:
                del self._running[ticket.key]
            self._ends.append(self._clock())
            self.admit_waiting()
        elif ticket in self._waiting.get(ticket.key, ()):
            self._remove(ticket)

    def _run(self, ticket: QueueTicket) -> None:
        self.running += 1
        self._running[ticket.key] += 1
        self._waited(self._clock() - ticket.joined)
        ticket.runs = True
        ticket.end_wait()

    def _remove(self, ticket: QueueTicket) -> None:
        tickets = self._waiting[ticket.key]
        del tickets[ticket]
        if not tickets:
            del self._waiting[ticket.key]
        self.waiting -= 1

    def _retry_seconds(self, before: int) -> int:
        """Until so many who wait have had their turn, if requests go on ending as they did."""
        shortest, longest = _RETRY_SECONDS
        if len(self._ends) < 2:
            return shortest
        each = (self._clock() - self._ends[0]) / len(self._ends)
        return math.ceil(min(max(before * each, shortest), longest))


class QueueTicket:
    """A request's ticket: it waits, then it runs, then it is left.

    Attributes:
        joined: when it was taken, by the queue's clock.
        runs: whether its turn has come and it has not been left.
    """

    __slots__ = ("_left", "_queue", "joined", "key", "runs", "waited")

    def __init__(self, queue: AdmissionQueue, key: str | None, joined: float) -> None:
        self._queue = queue
        self._left = False
        self.key = key
        self.joined = joined
        self.runs = False
        self.waited: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def turn(self) -> None:
        """Wait for its turn.

        Raises:
            ServiceError: it has waited as long as one may, or its turn will not come.
        """
        if not self.runs:
            await self._queue.wait(self)

    def leave(self) -> None:
        """Give it up. After the first time nothing happens."""
        if self._left:
            return
        self._left = True
        self._queue.leave(self)
        self.runs = False
        self.waited.cancel()

    def end_wait(self) -> None:
        """It waits no more, whether its turn has come or will not."""
        if not self.waited.done():
            self.waited.set_result(None)
