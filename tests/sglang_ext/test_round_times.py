"""What passes take, in means that nothing waits for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_winnow.round_times import ASSUMED, BatchSize, Clock, RoundTimes

SIZE = BatchSize.of([900, 1100])


class Moments(Clock):
    """A clock whose device lags behind."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now = 0.0
        self.reached = float("inf")

    def mark(self) -> Any:
        return self.now

    def seconds(self, begin: Any, end: Any) -> float | None:
        return end - begin if end <= self.reached else None


def dense(times: RoundTimes, clock: Moments, seconds: float) -> None:
    begin = clock.mark()
    clock.now += seconds
    times.note_dense(SIZE, begin)


def round_of(times: RoundTimes, clock: Moments, drafts: int, draft: float, check: float) -> None:
    begin = clock.mark()
    clock.now += drafts * draft
    drafted = clock.mark()
    clock.now += check
    times.note_round(SIZE, begin, begin, drafted, drafts)


def test_costs_are_relative_to_dense_passes_of_such_batches() -> None:
    clock = Moments()
    times = RoundTimes(clock)
    assert times.costs(SIZE) is None
    # The first of a kind is not counted.
    dense(times, clock, 50.0)
    assert times.costs(SIZE) is None
    dense(times, clock, 2.0)
    assert times.costs(SIZE) == ASSUMED
    round_of(times, clock, 3, 9.0, 9.0)
    for _ in range(5):
        round_of(times, clock, 4, 0.5, 3.0)
    found = times.costs(SIZE)
    assert found is not None
    assert found.draft == pytest.approx(0.25)
    # Four drafts are checked five tokens wide, three as well; what is not known is like the nearest.
    assert [found.check(drafts) for drafts in (3, 4, 8)] == pytest.approx([1.5, 1.5, 1.5])
    for _ in range(5):
        round_of(times, clock, 8, 0.5, 8.0)
    found = times.costs(SIZE)
    assert found is not None
    assert [found.check(drafts) for drafts in (1, 4, 5, 16)] == pytest.approx([1.5, 1.5, 4.0, 4.0])
    assert times.costs(BatchSize.of([900, 2000])) is None


def test_what_lies_between_rounds_is_part_of_checks() -> None:
    """Of a draft that was made ahead nobody knows when the host came to need it: it takes what others take."""
    clock = Moments()
    times = RoundTimes(clock)
    for _ in range(2):
        dense(times, clock, 2.0)
    for drafts in (4, 4, 4, 4, 1, 1):
        begin = clock.mark()
        clock.now += 0.75
        drafting = clock.mark()
        clock.now += 0.5 * (drafts - 1)
        drafted = clock.mark()
        clock.now += 3.0
        times.note_round(SIZE, begin, drafting, drafted, drafts, drafts_ahead=1)
    found = times.costs(SIZE)
    assert found is not None
    assert found.draft == pytest.approx(0.25)
    assert [found.check(drafts) for drafts in (1, 4)] == pytest.approx([1.625, 1.625])


def test_drafts_in_steps_of_their_own_are_no_part_of_the_check() -> None:
    """Costs of steps are apart from those of whole rounds of as large batches."""
    size = BatchSize.of([900, 1100], in_steps=True)
    clock = Moments()
    times = RoundTimes(clock)
    for _ in range(2):
        dense(times, clock, 2.0)
    assert times.costs(size) is None
    for _ in range(2):
        begin = clock.mark()
        clock.now += 2.0
        times.note_dense(size, begin)
    for _ in range(4):
        for _ in range(3):
            begin = clock.mark()
            clock.now += 0.5
            times.note_draft(size, begin)
        begin = clock.mark()
        clock.now += 0.5
        drafted = clock.mark()
        clock.now += 3.0
        times.note_round(size, begin, begin, drafted, 4, earlier=3)
    found = times.costs(size)
    assert found is not None
    assert found.draft == pytest.approx(0.25)
    assert found.check(4) == pytest.approx(1.5)
    assert times.costs(SIZE) == ASSUMED


def test_a_check_is_not_free() -> None:
    clock = Moments()
    times = RoundTimes(clock)
    for _ in range(2):
        dense(times, clock, 1.0)
    for _ in range(3):
        round_of(times, clock, 1, 8.0, 1.0)
        # Shorter than drafts were.
        round_of(times, clock, 1, 0.5, 0.5)
    found = times.costs(SIZE)
    assert found is not None
    assert found.check(1) > 0


def test_one_pass_that_was_held_up_does_not_tell() -> None:
    clock = Moments()
    times = RoundTimes(clock)
    for seconds in (1.0, 1.0, 1000.0):
        dense(times, clock, seconds)
    round_of(times, clock, 1, 1.0, 1.0)
    round_of(times, clock, 1, 1.0, 1.0)
    found = times.costs(SIZE)
    assert found is not None
    assert found.check(1) > 0.75


def test_nothing_waits_for_the_device() -> None:
    clock = Moments()
    times = RoundTimes(clock)
    clock.reached = 1.0
    for _ in range(200):
        dense(times, clock, 1.0)
    assert times.costs(SIZE) is None
    clock.reached = float("inf")
    assert times.costs(SIZE) == ASSUMED


def test_a_clock_without_a_device_tells_seconds() -> None:
    clock = Clock(torch.device("cpu"))
    begin, end = clock.mark(), clock.mark()
    seconds = clock.seconds(begin, end)
    assert seconds is not None
    assert 0 <= seconds < 60
