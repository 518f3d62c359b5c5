"""What a task produces: a context, and questions whose answers are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One question on a context.

    Attributes:
        text: the question as a user would ask it.
        answer: the answer in the form a model is trained to give.
        references: the strings that an answer is scored against, each found or not (RULER, string match).
        given: the beginning of the answer, if the model is given one to continue; ``answer`` follows it directly.
    """

    text: str
    answer: str
    references: tuple[str, ...]
    given: str = ""


@dataclass(frozen=True)
class Sample:
    """A context with at least one question. The evaluation asks the first; training asks them all.

    Attributes:
        separator: what stands between the context and a question.
    """

    context: str
    questions: tuple[Question, ...]
    separator: str = "\n\n"

    @property
    def prompt(self) -> str:
        """The user message of a single-turn conversation: the context, then its first question."""
        return f"{self.context}{self.separator}{self.questions[0].text}"


@dataclass(frozen=True)
class Task:
    """A kind of sample whose length can be chosen.

    Attributes:
        name: the task's name on the command line and in tables.
        summary: one line for ``winnow eval --list``.
        make: ``make(rng, size)`` builds a sample of about ``size`` English words in its context, or of the
            task's smallest size if that is larger. The same ``rng`` state and size give the same sample.
        answer_tokens: how many output tokens suffice for the answer of a sample of ``size`` words.
    """

    name: str
    summary: str
    make: Callable[[random.Random, int], Sample]
    answer_tokens: Callable[[int], int]
