"""What the users ask."""

from __future__ import annotations

import random
from typing import Final

_SUBJECTS: Final = ("The harbour", "A letter", "The old mill", "Her brother", "The committee", "A northern wind")
_VERBS: Final = ("reached", "left", "described", "repaired", "forgot", "measured")
_OBJECTS: Final = ("the valley", "a narrow bridge", "the second report", "every lantern", "the winter stores")
_WHEN: Final = ("before noon", "without a word", "in the third year", "as the rain began", "for the last time")
_QUESTIONS: Final = (
    "What happened first?",
    "Who was there?",
    "Say it in one sentence.",
    "Why would that matter?",
    "What is left out?",
)
_PROBLEMS: Final = (
    "A train leaves at {a} and another {b} minutes later, half as fast again. When do they meet? Think step by step.",
    "There are {a} sacks, {b} of them torn. How many ways are there to choose three whole ones? Think step by step.",
    "A tank fills in {a} minutes and drains in {b}. With both open, when is it full? Think step by step.",
)


def question(chooser: random.Random) -> str:
    """A few words of somebody who chats."""
    return f"{_sentence(chooser)} {chooser.choice(_QUESTIONS)}"


def document(chooser: random.Random, words: int) -> str:
    """A text of about so many words that no other request begins with, and a question about it."""
    sentences: list[str] = []
    length = 0
    while length < words:
        sentences.append(_sentence(chooser))
        length += len(sentences[-1].split())
    return f"{' '.join(sentences)}\n\n{chooser.choice(_QUESTIONS)}"


def problem(chooser: random.Random) -> str:
    """Something to reason about at length."""
    return chooser.choice(_PROBLEMS).format(a=chooser.randint(10, 99), b=chooser.randint(3, 9))


def _sentence(chooser: random.Random) -> str:
    parts = (_SUBJECTS, _VERBS, _OBJECTS, _WHEN)
    return f"{' '.join(chooser.choice(part) for part in parts)} on day {chooser.randint(1, 9999)}."
