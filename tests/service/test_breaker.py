"""The circuit breaker: when a runtime is asked, and when not."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from winnow_service.runtime.breaker import BreakerState, CircuitBreaker, Permit

FAILURES = 3
OPEN_SECONDS = 5.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def breaker_and_clock() -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    return CircuitBreaker(FAILURES, OPEN_SECONDS, clock), clock


def state(breaker: CircuitBreaker) -> BreakerState:
    """Its state now: time changes it."""
    return breaker.state


def opened() -> tuple[CircuitBreaker, Clock]:
    breaker, clock = breaker_and_clock()
    for _ in range(FAILURES):
        breaker.permit().failed()
    assert state(breaker) is BreakerState.OPEN
    return breaker, clock


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker, _ = breaker_and_clock()
    for _ in range(10):
        for _ in range(FAILURES - 1):
            breaker.permit().failed()
        breaker.permit().answered()
    assert state(breaker) is BreakerState.CLOSED


def test_one_request_tries_and_closes_it() -> None:
    breaker, clock = opened()
    clock.now += OPEN_SECONDS - 0.01
    assert not breaker.permits
    clock.now += 0.01
    assert state(breaker) is BreakerState.HALF_OPEN
    probe = breaker.permit()
    assert not breaker.permits
    probe.answered()
    assert state(breaker) is BreakerState.CLOSED
    breaker.permit().failed()
    assert state(breaker) is BreakerState.CLOSED


def test_a_probe_that_fails_opens_it_for_as_long_again() -> None:
    breaker, clock = opened()
    clock.now += OPEN_SECONDS
    breaker.permit().failed()
    assert state(breaker) is BreakerState.OPEN
    assert breaker.retry_in == OPEN_SECONDS


def test_a_probe_that_says_nothing_makes_room_for_another() -> None:
    breaker, clock = opened()
    clock.now += OPEN_SECONDS
    breaker.permit().drop()
    assert breaker.permits


def test_while_a_probe_takes_long_others_try() -> None:
    breaker, clock = opened()
    clock.now += OPEN_SECONDS
    long = breaker.permit()
    clock.now += OPEN_SECONDS - 0.01
    assert not breaker.permits
    clock.now += 0.01
    short = breaker.permit()
    assert not breaker.permits
    short.answered()
    assert state(breaker) is BreakerState.CLOSED
    # It was sent before.
    for _ in range(FAILURES):
        long.failed()
    assert state(breaker) is BreakerState.CLOSED


def test_the_first_of_several_probes_to_be_answered_closes_it() -> None:
    breaker, clock = opened()
    clock.now += OPEN_SECONDS
    long = breaker.permit()
    clock.now += OPEN_SECONDS
    breaker.permit()
    long.answered()
    assert state(breaker) is BreakerState.CLOSED


def test_a_probe_that_is_being_answered_closes_it_and_its_end_counts() -> None:
    breaker, clock = opened()
    clock.now += OPEN_SECONDS
    probe = breaker.permit()
    probe.begun()
    assert state(breaker) is BreakerState.CLOSED
    for permit in [breaker.permit() for _ in range(FAILURES - 1)]:
        permit.begun()
        permit.failed()
    probe.failed()
    assert state(breaker) is BreakerState.OPEN


def test_requests_from_before_do_not_open_it_again() -> None:
    breaker, clock = breaker_and_clock()
    old = [breaker.permit() for _ in range(3 * FAILURES)]
    for permit in old[:FAILURES]:
        permit.failed()
    clock.now += OPEN_SECONDS
    breaker.permit().answered()
    for permit in old[FAILURES:]:
        permit.failed()
    assert state(breaker) is BreakerState.CLOSED


class BreakerMachine(RuleBasedStateMachine):
    """Any sequence of requests and outcomes."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker, self.clock = breaker_and_clock()
        self.under_way: list[Permit] = []
        self.probes: list[Permit] = []
        self.failures_since_answer = 0
        # What was sent before it was closed last does not count.
        self.closings = 0
        self.sent_after: dict[Permit, int] = {}

    @precondition(lambda self: self.breaker.permits)
    @rule()
    def begin(self) -> None:
        half_open = self.breaker.state is BreakerState.HALF_OPEN
        permit = self.breaker.permit()
        self.under_way.append(permit)
        self.sent_after[permit] = self.closings
        if half_open:
            self.probes.append(permit)
            assert not self.breaker.permits

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), outcome=st.sampled_from(["answered", "failed", "nothing"]), begun=st.booleans())
    def end(self, data: st.DataObject, outcome: str, begun: bool) -> None:
        permit = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        before = self.breaker.state
        is_probe = permit in self.probes
        if begun:
            permit.begun()
            if self.breaker.state is not before:
                assert (before, self.breaker.state) == (BreakerState.HALF_OPEN, BreakerState.CLOSED)
                assert is_probe
                before = BreakerState.CLOSED
                self.closed()
                self.sent_after[permit] = self.closings
        counts = self.sent_after[permit] == self.closings
        if outcome == "answered":
            permit.answered()
            self.failures_since_answer = 0 if counts else self.failures_since_answer
        elif outcome == "failed":
            permit.failed()
            self.failures_since_answer += counts
        permit.drop()
        after = self.breaker.state
        if before is not BreakerState.CLOSED and after is BreakerState.CLOSED:
            self.closed()
        if before is BreakerState.CLOSED and after is BreakerState.OPEN:
            assert self.failures_since_answer >= FAILURES
        if before is not BreakerState.CLOSED and after is not before:
            assert is_probe
        if after is BreakerState.OPEN:
            self.probes.clear()

    def closed(self) -> None:
        self.closings += 1
        self.probes.clear()
        self.failures_since_answer = 0

    @rule(seconds=st.floats(0, 2 * OPEN_SECONDS))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def seen_ready(self) -> None:
        self.breaker.try_now()
        self.probes.clear()
        assert self.breaker.permits

    @invariant()
    def an_open_one_asks_nobody_and_says_until_when(self) -> None:
        if self.breaker.state is BreakerState.OPEN:
            assert not self.breaker.permits
            # Sums of seconds are rounded.
            assert 0 < self.breaker.retry_in <= OPEN_SECONDS + 1e-6
        else:
            assert self.breaker.retry_in <= 0

    @invariant()
    def a_closed_one_asks(self) -> None:
        assert self.breaker.permits or self.breaker.state is not BreakerState.CLOSED

    def teardown(self) -> None:
        # Whatever has happened: when all requests are over and time has passed, it asks again.
        for permit in self.under_way:
            permit.drop()
        self.clock.now += OPEN_SECONDS + 1e-6
        assert self.breaker.permits


TestAnySequence = BreakerMachine.TestCase
