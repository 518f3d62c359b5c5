"""What holds for every task: the same sample for the same seed, an answer that scores full marks, the right size."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from winnow_evaluation.tasks import TASKS
from winnow_evaluation.tasks.sample import Sample
from winnow_evaluation.tasks.scoring import found_fraction

names = st.sampled_from(sorted(TASKS))
seeds = st.integers(0, 2**64 - 1)
sizes = st.integers(1, 1500)


def words_of(sample: Sample) -> int:
    """Words after the introduction; the numbers of a list whose items are words do not count."""
    body = sample.context.split("\n\n", 1)[1]
    if re.fullmatch(r"(\d+\. [a-z]+ ?)+", body):
        body = re.sub(r"\d+\. ", "", body)
    return len(body.split())


def test_the_tasks_are_rulers_and_the_records() -> None:
    assert list(TASKS) == [
        "niah_single_1",
        "niah_single_2",
        "niah_single_3",
        "niah_multikey_1",
        "niah_multikey_2",
        "niah_multikey_3",
        "niah_multivalue",
        "niah_multiquery",
        "vt",
        "cwe",
        "fwe",
        "records",
    ]
    assert all(task.name == name and task.summary for name, task in TASKS.items())


@given(names, seeds, sizes)
def test_the_same_state_gives_the_same_sample(name: str, seed: int, size: int) -> None:
    rng = random.Random(seed)
    state = rng.getstate()
    sample = TASKS[name].make(rng, size)
    rng.setstate(state)
    assert TASKS[name].make(rng, size) == sample


@settings(max_examples=50)
@given(names, seeds)
def test_another_seed_gives_another_sample(name: str, seed: int) -> None:
    make = TASKS[name].make
    assert make(random.Random(seed), 300) != make(random.Random(seed + 1), 300)


def test_samples_do_not_depend_on_the_process() -> None:
    program = (
        "import hashlib, random; from winnow_evaluation.tasks import TASKS; "
        "print(hashlib.sha256(repr([t.make(random.Random(7), 900) for t in TASKS.values()]).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


@given(names, seeds, sizes)
def test_the_answer_scores_full_marks_and_an_empty_one_none(name: str, seed: int, size: int) -> None:
    for question in TASKS[name].make(random.Random(seed), size).questions:
        assert found_fraction(question.answer, question.references) == 1.0
        assert found_fraction("", question.references) == 0.0


@example("cwe", 595, 595)  # "often" is one of its ten words, and in the question.
@given(names, seeds, sizes)
def test_every_reference_is_in_the_context_and_none_in_the_question(name: str, seed: int, size: int) -> None:
    sample = TASKS[name].make(random.Random(seed), size)
    for question in sample.questions:
        assert question.references
        assert len(set(question.references)) == len(question.references)
        assert all(reference in sample.context for reference in question.references)
        most = 1 / len(question.references) if name == "cwe" else 0
        assert found_fraction(question.text, question.references) <= most


@given(names, seeds, sizes)
def test_the_prompt_is_the_context_and_then_the_first_question(name: str, seed: int, size: int) -> None:
    sample = TASKS[name].make(random.Random(seed), size)
    assert sample.prompt == f"{sample.context}\n\n{sample.questions[0].text}"


@given(names, seeds, st.integers(400, 3000))
def test_the_context_has_about_the_words_asked_for(name: str, seed: int, size: int) -> None:
    # A haystack of needles counts a key of two words as one.
    most = 1.15 if name == "niah_multikey_2" else 1.05
    assert 0.93 * size <= words_of(TASKS[name].make(random.Random(seed), size)) <= most * size


@given(names, seeds, st.integers(1, 120))
def test_a_size_below_the_smallest_gives_a_sample_all_the_same(name: str, seed: int, size: int) -> None:
    sample = TASKS[name].make(random.Random(seed), size)
    assert 0 < words_of(sample) <= 180
    assert len(sample.questions) == 1


@pytest.mark.parametrize("name", sorted(TASKS))
def test_the_context_grows_with_the_size(name: str) -> None:
    lengths = [words_of(TASKS[name].make(random.Random(0), size)) for size in (150, 300, 600, 1200, 2400, 4800, 9600)]
    assert all(1.6 * shorter < longer for shorter, longer in pairwise(lengths))
