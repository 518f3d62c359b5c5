"""The circuit breaker of a runtime: after failures in a row nobody waits for it, until one request has tried."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum


class BreakerState(StrEnum):
    """Whether the runtime is asked.

    Closed: it is. Open: it is not, for some time. Half open: one request tries whether it answers again; if that has
    not told after some time, because its answer comes in one piece, another does.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Opens after ``failures`` in a row, and lets a request try ``open_seconds`` later, and each as many after another.

    Args:
        clock: seconds that only go forward.
    """

    def __init__(self, failures: int, open_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_failures = failures
        self._open_seconds = open_seconds
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._opened = 0.0
        self._probes: set[Permit] = set()
        self._probed = 0.0
        # Requests that were sent before it was closed last say nothing about the runtime as it is now.
        self._round = 0

    @property
    def state(self) -> BreakerState:
        if self._state is BreakerState.OPEN and self.retry_in <= 0:
            self._state = BreakerState.HALF_OPEN
        return self._state

    @property
    def retry_in(self) -> float:
        """Seconds until the next request may try; 0 or less if time is not what it waits for."""
        return self._opened + self._open_seconds - self._clock() if self._state is BreakerState.OPEN else 0.0

    @property
    def permits(self) -> bool:
        """Whether a request may be sent now."""
        state = self.state
        if state is BreakerState.HALF_OPEN:
            return not self._probes or self._clock() - self._probed >= self._open_seconds
        return state is BreakerState.CLOSED

    def permit(self) -> Permit:
        """Let one request be sent, which must be permitted now. Its outcome must be reported."""
        assert self.permits
        permit = Permit(self, self._round)
        if self._state is BreakerState.HALF_OPEN:
            self._probes.add(permit)
            self._probed = self._clock()
        return permit

    def try_now(self) -> None:
        """Let a request try, if none may: there is reason to think that the runtime answers again."""
        if self._state is not BreakerState.CLOSED:
            self._state = BreakerState.HALF_OPEN
            self._probes.clear()

    def begun(self, permit: Permit) -> None:
        """``permit`` is being answered. That is enough of a probe: its stream may take long."""
        if permit in self._probes and self.state is BreakerState.HALF_OPEN:
            self._close()
            permit.round = self._round

    def judge(self, permit: Permit, *, answered: bool) -> None:
        """Take the outcome of ``permit``. While the breaker is not closed, that of probes alone counts."""
        if self.state is BreakerState.CLOSED:
            if permit.round != self._round:
                return
            self._failures = 0 if answered else self._failures + 1
            if self._failures >= self._most_failures:
                self._open()
        elif permit in self._probes:
            if answered:
                self._close()
            else:
                self._open()

    def drop(self, permit: Permit) -> None:
        """Forget ``permit``, which has told nothing."""
        self._probes.discard(permit)

    def _close(self) -> None:
        self._state, self._failures = BreakerState.CLOSED, 0
        self._probes.clear()
        self._round += 1

    def _open(self) -> None:
        self._state, self._opened = BreakerState.OPEN, self._clock()
        self._probes.clear()


class Permit:
    """One request that may be sent, and its outcome."""

    __slots__ = ("_breaker", "round")

    def __init__(self, breaker: CircuitBreaker, number: int) -> None:
        self._breaker = breaker
        self.round = number

    def begun(self) -> None:
        """The runtime has begun to answer it."""
        self._breaker.begun(self)

    def answered(self) -> None:
        """The runtime has answered it."""
        self._breaker.judge(self, answered=True)

    def failed(self) -> None:
        """The runtime does not answer it, or not any more."""
        self._breaker.judge(self, answered=False)

    def drop(self) -> None:
        """It is over. If nothing was told before, it says nothing about the runtime."""
        self._breaker.drop(self)
