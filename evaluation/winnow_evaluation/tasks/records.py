"""The long-answer task, this project's own: reproduce every record of a list, in order."""

from __future__ import annotations

import random

from winnow_evaluation.tasks.sample import Question, Sample, Task
from winnow_evaluation.tasks.words import ADJECTIVES, NOUNS

_INTRODUCTIONS = (
    "Below is a register. Each line is one record.",
    "Here are the records of a warehouse, one on each line.",
    "The following list of records must be kept exactly as it is.",
)
_QUESTIONS = (
    "Reproduce all the records in order, one on each line.",
    "Write out the whole list of records again, from the first to the last.",
    "Copy every record, line by line, in the order of the list.",
)
_WORDS_PER_RECORD = 4


def make(rng: random.Random, size: int) -> Sample:
    """Build a register of about ``size`` words, four to a record. The answer is as long as the context."""
    records = [
        f"{number}. {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {rng.randint(10_000, 99_999)}"
        for number in range(1, max(2, size // _WORDS_PER_RECORD) + 1)
    ]
    context = rng.choice(_INTRODUCTIONS) + "\n\n" + "\n".join(records)
    return Sample(context, (Question(rng.choice(_QUESTIONS), "\n".join(records), tuple(records)),))


TASKS = [Task("records", "reproduce hundreds of records in order", make, answer_tokens=lambda size: 3 * size)]
