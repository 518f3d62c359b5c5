"""Variable tracking: run the program that the context spells out."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow_evaluation.tasks import TASKS, variable_tracking
from winnow_evaluation.tasks.sample import Sample

_ASSIGNMENT = re.compile(r"(?:VAR|LET|SET|ASSIGN) (?P<name>[A-Z]{5}) (?:=|TO|:=) (?:VAR )?(?P<what>[A-Z]{5}|\d{5})")

seeds = st.integers(0, 2**64 - 1)


def variables_by_value(sample: Sample) -> dict[str, list[str]]:
    """Which variables hold a value once all lines ran, in the order of their assignments.

    Raises:
        KeyError: a variable is read before it has a value.
    """
    values: dict[str, str] = {}
    for line in sample.context.split("\n"):
        if match := _ASSIGNMENT.fullmatch(line):
            assert match["name"] not in values
            what = match["what"]
            values[match["name"]] = what if what.isdigit() else values[what]
    held: dict[str, list[str]] = {}
    for name, value in values.items():
        held.setdefault(value, []).append(name)
    return held


@given(seeds, st.integers(1, 1000), st.integers(1, 6), st.integers(1, 6))
def test_the_answer_is_what_running_the_assignments_gives(seed: int, size: int, chains: int, hops: int) -> None:
    sample = variable_tracking.make(random.Random(seed), size, chains, hops)
    held = variables_by_value(sample)
    assert len(sample.questions) == len(held) == chains
    asked = []
    for question in sample.questions:
        (value,) = re.findall(r"\d{5}", question.text)
        asked.append(value)
        assert list(question.references) == held[value]
        assert len(question.references) == hops + 1
        assert question.answer == "They are " + ", ".join(question.references)
    assert sorted(asked) == sorted(held)


@given(seeds, st.integers(50, 1000), st.integers(1, 4), st.integers(1, 6))
def test_each_variable_copies_the_one_before_it(seed: int, size: int, chains: int, hops: int) -> None:
    sample = variable_tracking.make(random.Random(seed), size, chains, hops)
    sources = {match["name"]: match["what"] for match in _ASSIGNMENT.finditer(sample.context)}
    assert len(sources) == chains * (hops + 1)
    for question in sample.questions:
        first, *others = question.references
        assert sources[first] in question.text
        assert [sources[name] for name in others] == list(question.references[:-1])


@pytest.mark.parametrize("seed", range(10))
def test_the_named_task_has_one_chain_of_four_hops(seed: int) -> None:
    sample = TASKS["vt"].make(random.Random(seed), 700)
    assert [len(names) for names in variables_by_value(sample).values()] == [5]


def test_every_style_of_assignment_comes_up() -> None:
    styles = {
        match[0].split()[0]
        for seed in range(60)
        for match in _ASSIGNMENT.finditer(TASKS["vt"].make(random.Random(seed), 100).context)
    }
    assert styles == {"VAR", "LET", "SET", "ASSIGN"}
