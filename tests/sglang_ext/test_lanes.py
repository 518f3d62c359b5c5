"""Selectors side by side: which may run at once, and what waits for what in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_winnow.device.lanes import Lanes, lanes_of
from winnow_kernels.policies.declarations import KINDS


def selector(*, in_layers: bool = True, meet: bool = False) -> Any:
    return SimpleNamespace(selects_in_layers=in_layers, programs_meet=meet)


def test_kinds_whose_programs_meet_follow_each_other() -> None:
    meeting = ("lowbit_top_p", "lowbit_top_k")
    selectors = {kind: selector(in_layers=kind != "streaming_llm", meet=kind in meeting) for kind in KINDS}
    first, *others = lanes_of(selectors)
    assert set(first) == set(meeting)
    assert others == [[kind] for kind in reversed(KINDS) if kind not in ("streaming_llm", *meeting)]
    assert lanes_of({"quest": selector()}) == [["quest"]]
    assert lanes_of({"streaming_llm": selector(in_layers=False)}) == []


class Stream:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self._events = events

    def wait_stream(self, other: Stream) -> None:
        self._events.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens on a GPU whose current stream is called current."""
    found: list[str] = []
    current = Stream("current", found)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        found.append(f"on {stream.name}")
        yield
        found.append("on current")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _, priority: Stream(f"priority {priority}", found))
    return found


def tasks(events: list[str], count: int) -> list[Callable[[], None]]:
    return [lambda number=number: events.append(f"task {number}") for number in range(count)]  # type: ignore[misc]


def test_in_a_graph_tasks_run_side_by_side_the_first_before_others(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    Lanes(4, torch.device("cuda")).run(tasks(events, 3))
    assert events == [
        "priority -2 waits for current",
        "on priority -2",
        "task 0",
        "on current",
        "priority -1 waits for current",
        "on priority -1",
        "task 1",
        "on current",
        "task 2",
        "current waits for priority -2",
        "current waits for priority -1",
    ]


def test_there_are_as_many_lanes_as_are_asked_for(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    Lanes(9, torch.device("cuda")).run(tasks(events, 9))
    priorities = [int(event.split()[-1]) for event in events if event.startswith("on priority")]
    assert priorities == [-3, -3, -3, -3, -3, -3, -2, -1]
    assert events[-9] == "task 8"


@pytest.mark.parametrize(("device", "capturing", "count"), [("cuda", False, 3), ("cuda", True, 1), ("cpu", True, 3)])
def test_elsewhere_they_follow_each_other(
    device: str, capturing: bool, count: int, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    Lanes(3, torch.device(device)).run(tasks(events, count))
    assert events == [f"task {number}" for number in range(count)]
