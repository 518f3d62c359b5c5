"""The queue before the runtimes: its bounds, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow_service.admission.queue import AdmissionQueue, QueueBounds, QueueTicket
from winnow_service.errors import ServiceError

WAITING, PER_KEY = 6, 4


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def refused(code: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[ServiceError]]:
    with pytest.raises(ServiceError, match=match) as caught:
        yield caught
    assert caught.value.code == code


def queue_of(capacity: int, seconds: float = 30.0, waits: list[float] | None = None) -> tuple[AdmissionQueue, Clock]:
    clock = Clock()
    told = [] if waits is None else waits
    return AdmissionQueue(QueueBounds(WAITING, PER_KEY, seconds), lambda: capacity, told.append, clock), clock


async def test_bounds_of_a_key_and_of_all() -> None:
    queue, _ = queue_of(1)
    running = queue.join("a")
    assert running.runs
    waiting = [queue.join("a") for _ in range(PER_KEY)]
    with refused("key_queue_full") as of_key:
        queue.join("a")
    assert (of_key.value.status, of_key.value.headers) == (429, {"retry-after": "1"})
    waiting += [queue.join("b") for _ in range(WAITING - PER_KEY)]
    with refused("queue_full") as of_all:
        queue.join("c")
    assert of_all.value.status == 503
    assert (queue.running, queue.waiting) == (1, WAITING)
    waiting[0].leave()
    queue.join("c")


async def test_without_keys_one_bound_holds() -> None:
    queue, _ = queue_of(1)
    queue.join(None)
    for _ in range(WAITING):
        queue.join(None)
    with refused("queue_full"):
        queue.join(None)


async def test_a_wait_ends_in_time_and_the_next_is_not_lost() -> None:
    queue, _ = queue_of(1, seconds=0.05)
    running, late, next_one = queue.join("a"), queue.join("a"), queue.join("a")
    with refused("queue_timeout", r"0\.05 seconds"):
        await late.turn()
    late.leave()
    turn = asyncio.create_task(next_one.turn())
    running.leave()
    await turn
    assert next_one.runs
    assert (queue.running, queue.waiting) == (1, 0)


async def test_who_leaves_while_it_waits_takes_no_turn() -> None:
    queue, _ = queue_of(1)
    running, gone, next_one = queue.join("a"), queue.join("a"), queue.join("a")
    waiting = asyncio.create_task(gone.turn())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    # Its turn comes before it has been left.
    running.leave()
    gone.leave()
    gone.leave()
    assert next_one.runs
    assert queue.running == 1


async def test_closing_refuses_those_who_wait_and_those_who_come() -> None:
    queue, _ = queue_of(1)
    running, waiting, not_yet = queue.join("a"), queue.join("a"), queue.join("b")
    turn = asyncio.create_task(waiting.turn())
    await asyncio.sleep(0)
    queue.close()
    with refused("draining"):
        await turn
    with refused("draining"):
        await not_yet.turn()
    with refused("draining"):
        queue.join("c")
    assert running.runs
    for ticket in (running, waiting, not_yet):
        ticket.leave()
    assert (queue.running, queue.waiting) == (0, 0)


async def test_more_capacity_lets_more_through() -> None:
    capacity = 1
    queue = AdmissionQueue(QueueBounds(WAITING, PER_KEY, 1), lambda: capacity, lambda _: None)
    tickets = [queue.join("a") for _ in range(4)]
    capacity = 3
    queue.admit_waiting()
    assert [ticket.runs for ticket in tickets] == [True, True, True, False]


async def test_retry_after_follows_the_pace_and_waits_are_measured() -> None:
    waits: list[float] = []
    queue, clock = queue_of(1, waits=waits)
    ticket = queue.join("a")
    for _ in range(10):
        following = queue.join("a")
        clock.now += 4
        ticket.leave()
        ticket = following
    assert waits == [0.0] + [4.0] * 10
    for _ in range(PER_KEY):
        queue.join("a")
    with refused("key_queue_full") as full:
        queue.join("a")
    # Four wait, and one ends every four seconds or so.
    assert 13 <= int(full.value.headers["retry-after"]) <= 16
    clock.now += 3600
    with refused("key_queue_full") as later:
        queue.join("a")
    assert later.value.headers == {"retry-after": "60"}


async def test_a_key_that_asks_for_much_leaves_the_others_their_share() -> None:
    queue = AdmissionQueue(QueueBounds(1000, 1000, 30), lambda: 12, lambda _: None)
    tickets: list[QueueTicket] = [queue.join("greedy") for _ in range(500)]
    tickets += [queue.join(key) for key in ("b", "c") for _ in range(20)]
    # Requests of the greedy key are long: those of others end first, and it must not gain by it.
    for _ in range(300):
        running = [ticket for ticket in tickets if ticket.runs]
        short = [ticket for ticket in running if ticket.key != "greedy"]
        ends = short[0] if short and len(running) % 2 else running[0]
        ends.leave()
        tickets.remove(ends)
        if ends.key != "greedy":
            tickets.append(queue.join(ends.key))
    shares = Counter(ticket.key for ticket in tickets if ticket.runs)
    assert shares == {"greedy": 4, "b": 4, "c": 4}


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "capacity"]), st.sampled_from("abc"), st.integers(0, 30)), max_size=80
)


@settings(max_examples=200)
@given(OPERATIONS)
def test_whatever_happens_the_bounds_hold_and_nobody_waits_for_nothing(operations: list[tuple[str, str, int]]) -> None:
    async def scenario() -> None:
        capacity = 2
        queue = AdmissionQueue(QueueBounds(WAITING, PER_KEY, 30), lambda: capacity, lambda _: None)
        tickets: list[QueueTicket] = []
        for operation, key, number in operations:
            if operation == "join":
                refused_for = ""
                try:
                    tickets.append(queue.join(key))
                except ServiceError as full:
                    refused_for = full.code
                is_full = {
                    "key_queue_full": waiting_of(tickets, key) == PER_KEY,
                    "queue_full": queue.waiting == WAITING,
                }
                assert not refused_for or is_full[refused_for]
            elif operation == "leave" and tickets:
                tickets.pop(number % len(tickets)).leave()
            elif operation == "capacity":
                capacity = number % 4
                queue.admit_waiting()
            assert queue.running == sum(ticket.runs for ticket in tickets)
            assert queue.waiting == sum(not ticket.runs for ticket in tickets) <= WAITING
            assert all(waiting_of(tickets, each) <= PER_KEY for each in "abc")
            assert not (queue.waiting and queue.running < capacity)
        capacity = 100
        for ticket in tickets:
            ticket.leave()
        assert (queue.running, queue.waiting, queue._waiting, +queue._running) == (0, 0, {}, {})

    asyncio.run(scenario())


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=60), st.integers(1, 5))
def test_of_one_key_the_first_is_served_first(keys: list[str], capacity: int) -> None:
    async def scenario() -> None:
        queue = AdmissionQueue(QueueBounds(1000, 1000, 30), lambda: capacity, lambda _: None)
        tickets = [queue.join(key) for key in keys]
        served: list[Any] = [ticket for ticket in tickets if ticket.runs]
        for ticket in served:
            ticket.leave()
            served += [each for each in tickets if each.runs and each not in served]
        assert sorted(served, key=tickets.index) == tickets
        for key in "abcd":
            of_key = [ticket for ticket in served if ticket.key == key]
            assert of_key == sorted(of_key, key=tickets.index)

    asyncio.run(scenario())


def waiting_of(tickets: list[QueueTicket], key: str) -> int:
    return sum(ticket.key == key and not ticket.runs for ticket in tickets)
