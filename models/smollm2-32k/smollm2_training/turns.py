"""What a task generator makes: a context and questions on it, before they become tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One question and its answer.

    Attributes:
        question: what the user asks.
        given: how the answer begins; empty for none. A request may give it, or leave it to the model.
        answer: what follows; starts with a space.
    """

    question: str
    given: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """A context and at least one question on it.

    Attributes:
        kind: what it is, for statistics.
        context: what the first question follows immediately.
        turns: questions in their order.
    """

    kind: str
    context: str
    turns: list[Turn]
