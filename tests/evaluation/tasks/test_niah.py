"""Needles in haystacks: what the context says, read back from its text alone."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow_evaluation.tasks import TASKS, niah
from winnow_evaluation.tasks.niah import NeedleTask
from winnow_evaluation.tasks.sample import Sample

_FORMS = {
    "numbers": r"[1-9]\d{6}",
    "words": r"[a-z]+ [a-z]+",
    "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}
_KIND = "(?:numbers?|words?|UUIDs?)"

needle_tasks = st.builds(
    NeedleTask,
    haystack=st.sampled_from(["noise", "essay", "needles"]),
    keys=st.sampled_from(["words", "uuids", "numbers"]),
    values=st.sampled_from(["words", "uuids", "numbers"]),
    key_count=st.integers(1, 8),
    values_per_key=st.integers(1, 5),
    keys_per_question=st.integers(1, 5),
)
seeds = st.integers(0, 2**64 - 1)
sizes = st.integers(1, 800)


def _pattern(wording: str, **slots: str) -> re.Pattern[str]:
    pattern = re.escape(wording)
    for slot, form in {"kind": _KIND, **slots}.items():
        pattern = pattern.replace(re.escape(f"{{{slot}}}"), form)
    return re.compile(pattern)


def needles_in(sample: Sample, task: NeedleTask) -> list[tuple[str, str]]:
    """Key and value of each needle, in the order of the text."""
    found = [
        (match.start(), match["key"], match["value"])
        for wording in niah._NEEDLES
        for match in _pattern(
            wording, key=f"(?P<key>{_FORMS[task.keys]})", value=f"(?P<value>{_FORMS[task.values]})"
        ).finditer(sample.context)
    ]
    return [(key, value) for _, key, value in sorted(found)]


def keys_in(question: str) -> list[str]:
    """The keys that a question names."""
    matches = [_pattern(wording, keys="(?P<keys>.+)").fullmatch(question) for wording in niah._QUESTIONS]
    (match,) = [match for match in matches if match]
    return re.split(", | and ", match["keys"])


def check(sample: Sample, task: NeedleTask) -> None:
    needles = needles_in(sample, task)
    values: dict[str, list[str]] = {}
    for key, value in needles:
        values.setdefault(key, []).append(value)

    hidden = max(task.key_count, task.keys_per_question)
    assert len(values) >= hidden if task.haystack == "needles" else len(values) == hidden
    assert all(len(each) == task.values_per_key for each in values.values())
    assert len({value for _, value in needles}) == len(needles)

    asked = [key for question in sample.questions for key in keys_in(question.text)]
    assert max(Counter(asked).values()) == 1
    for question in sample.questions:
        keys = keys_in(question.text)
        assert len(keys) == task.keys_per_question
        assert list(question.references) == [value for key in keys for value in values[key]]
        assert question.answer == ", ".join(question.references)


@given(needle_tasks, seeds, sizes, st.integers(1, 8))
def test_a_question_has_the_values_that_the_text_gives(task: NeedleTask, seed: int, size: int, questions: int) -> None:
    sample = niah.make(random.Random(seed), size, task, questions)
    check(sample, task)
    keys = len({key for key, _ in needles_in(sample, task)})
    assert len(sample.questions) == min(questions, keys // task.keys_per_question)


@pytest.mark.parametrize("name", list(niah.NEEDLE_TASKS))
def test_the_named_tasks_hide_what_ruler_hides(name: str) -> None:
    for seed in range(20):
        sample = TASKS[name].make(random.Random(seed), 500)
        check(sample, niah.NEEDLE_TASKS[name])
        assert len(sample.questions) == 1


def test_the_parameters_are_rulers() -> None:
    rulers = {
        "niah_single_1": NeedleTask("noise", "words", "numbers", 1, 1, 1),
        "niah_single_2": NeedleTask("essay", "words", "numbers", 1, 1, 1),
        "niah_single_3": NeedleTask("essay", "words", "uuids", 1, 1, 1),
        "niah_multikey_1": NeedleTask("essay", "words", "numbers", 4, 1, 1),
        "niah_multikey_2": NeedleTask("needles", "words", "numbers", 1, 1, 1),
        "niah_multikey_3": NeedleTask("needles", "uuids", "uuids", 1, 1, 1),
        "niah_multivalue": NeedleTask("essay", "words", "numbers", 1, 4, 1),
        "niah_multiquery": NeedleTask("essay", "words", "numbers", 4, 1, 4),
    }
    assert rulers == niah.NEEDLE_TASKS


@settings(max_examples=40)
@given(seeds, st.integers(100, 800), st.sampled_from(["words", "uuids", "numbers"]))
def test_a_haystack_of_needles_holds_nothing_else(seed: int, size: int, kind: niah.Kind) -> None:
    task = NeedleTask("needles", kind, "numbers")
    sample = niah.make(random.Random(seed), size, task)
    lines = sample.context.split("\n\n", 1)[1].split("\n")
    assert len(lines) == len(needles_in(sample, task)) >= size // 14


def test_needles_lie_anywhere_in_the_text() -> None:
    task = niah.NEEDLE_TASKS["niah_single_2"]
    depths = []
    for seed in range(200):
        sample = niah.make(random.Random(seed), 600, task)
        depths.append(sample.context.index(sample.questions[0].answer) / len(sample.context))
    tenths = Counter(int(10 * depth) for depth in depths)
    assert sorted(tenths) == list(range(10))
    assert max(tenths.values()) < 50


@given(needle_tasks, seeds)
def test_a_question_on_several_values_speaks_of_several(task: NeedleTask, seed: int) -> None:
    question = niah.make(random.Random(seed), 200, task).questions[0]
    if len(question.references) > 1:
        assert re.search(rf"\b{niah._PLURAL[task.values]}\b", question.text)
