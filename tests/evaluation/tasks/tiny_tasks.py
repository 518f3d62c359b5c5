"""Small tasks with known tokens for the fake model, in a module that worker processes can import."""

from __future__ import annotations

import random
from collections.abc import Mapping

from winnow_evaluation.tasks.sample import Question, Sample, Task

ANSWER_TOKENS = 8


def _needles(rng: random.Random, size: int, count: int) -> Sample:
    values = [str(rng.randint(1_000_000, 9_999_999)) for _ in range(count)]
    needles = [f"The code of oak is {value}." for value in values]
    filler = ["Rain falls on the hill." for _ in range(max(0, size - 6 * count) // 5)]
    for needle in needles:
        filler.insert(rng.randint(0, len(filler)), needle)
    return Sample(" ".join(filler), (Question("What is the code of oak?", ", ".join(values), tuple(values)),))


def _one(rng: random.Random, size: int) -> Sample:
    return _needles(rng, size, 1)


def _four(rng: random.Random, size: int) -> Sample:
    return _needles(rng, size, 4)


def _uneven(rng: random.Random, size: int) -> Sample:
    """Samples of one size differ by up to a third in their words."""
    return _needles(rng, int(size * rng.uniform(0.75, 1.0)), 1)


def _rare_giant(rng: random.Random, size: int) -> Sample:
    """One sample in ten is a quarter longer: too few for a measurement to notice for sure."""
    return _needles(rng, int(size * 1.25) if rng.random() < 0.1 else size, 1)


def tiny_tasks() -> Mapping[str, Task]:
    makers = {"tiny_one": _one, "tiny_four": _four, "uneven": _uneven, "giant": _rare_giant}
    return {name: Task(name, f"summary of {name}", make, lambda _size: ANSWER_TOKENS) for name, make in makers.items()}
