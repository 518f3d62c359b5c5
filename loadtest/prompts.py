"""What the users ask."""

from __future__ import annotations

import random
from typing import Final

from winnow_evaluation.tasks.filler_text import essay, sentence

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
    return f"{sentence(chooser)} {chooser.choice(_QUESTIONS)}"


def document(chooser: random.Random, words: int) -> str:
    """A text of about so many words that no other request begins with, and a question about it."""
    return f"{' '.join(essay(chooser, words))}\n\n{chooser.choice(_QUESTIONS)}"


def problem(chooser: random.Random) -> str:
    """Something to reason about at length."""
    return chooser.choice(_PROBLEMS).format(a=chooser.randint(10, 99), b=chooser.randint(3, 9))
