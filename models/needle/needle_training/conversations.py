"""Rows of text: conversations on one context, made by the same generators as the evaluation's tasks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from tokenizers import Tokenizer

from needle_training.tokenizer import ASSISTANT, BEGIN, END, SYSTEM, USER
from winnow_evaluation.tasks import niah, records, variable_tracking, word_extraction
from winnow_evaluation.tasks.niah import NeedleTask
from winnow_evaluation.tasks.sample import Question, Sample

_SYSTEM_PROMPTS = ("You are a careful assistant.", "Answer briefly.", "Answer from the text alone.")


@dataclass(frozen=True)
class Row:
    """A tokenized conversation.

    Attributes:
        kind: what it was made from, for statistics.
        tokens: its tokens.
        answers: for each answer the half-open range of its tokens, the end-of-turn token included.
    """

    kind: str
    tokens: list[int]
    answers: list[tuple[int, int]]


def _needles(rng: random.Random, words: int, questions: int) -> tuple[str, Sample]:
    name = rng.choice(list(niah.NEEDLE_TASKS))
    if rng.random() < 0.3:
        return name, niah.make(rng, words, niah.NEEDLE_TASKS[name], questions)
    values_per_key = rng.choice((1, 1, 2, 3, 4, 4, 5))
    most = max(1, words // (30 * values_per_key))
    key_count = min(most, rng.choice((1, 4, 8, 16, 32, 64, 128)))
    task = NeedleTask(
        haystack=rng.choice(get_args(niah.Haystack)),
        keys=rng.choice(("words", "words", "uuids", "uuids", "numbers")),
        values=rng.choice(("numbers", "numbers", "uuids")),
        key_count=key_count,
        values_per_key=values_per_key,
        keys_per_question=min(key_count, rng.choice((1, 1, 1, 1, 2, 3, 4, 5))),
    )
    return "niah_mixed", niah.make(rng, words, task, questions)


def _variables(rng: random.Random, words: int, _questions: int) -> tuple[str, Sample]:
    if rng.random() < 0.6:
        return "vt", variable_tracking.make(rng, words)
    hops = rng.randint(1, 6)
    chains = rng.randint(1, max(1, min(4, words // (12 * hops))))
    return "vt_mixed", variable_tracking.make(rng, words, chains, hops)


def _common(rng: random.Random, words: int, _questions: int) -> tuple[str, Sample]:
    return "cwe", word_extraction.make_common(rng, words)


def _frequent(rng: random.Random, words: int, _questions: int) -> tuple[str, Sample]:
    return "fwe", word_extraction.make_frequent(rng, words)


def _records(rng: random.Random, words: int, _questions: int) -> tuple[str, Sample]:
    # Lists of every length, or the network learns to copy across a few fixed distances.
    return "records", records.make(rng, int(words * rng.uniform(0.1, 1.0)))


_Maker = Callable[[random.Random, int, int], tuple[str, Sample]]
_KINDS: dict[str, tuple[_Maker, float]] = {
    "needles": (_needles, 0.75),
    "variables": (_variables, 0.75),
    "common": (_common, 0.22),
    "frequent": (_frequent, 0.25),
    "records": (_records, 0.22),
}
"""Maker and a first guess of words per token, high enough that a row is rarely much shorter than asked for."""


class Conversations:
    """Makes rows with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {name: tokenizer.token_to_id(name) for name in (BEGIN, SYSTEM, USER, ASSISTANT, END)}

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def row(self, rng: random.Random, kind: str, length: int) -> Row:
        """A conversation of ``kind`` of up to ``length`` tokens: one context, then questions as far as room goes.

        Every other one of 1,024 tokens or more is cut short, down to half, so that all lengths are seen.

        One in ten is plain text as a completion request has it: no special tokens, one question, then "Answer:".
        """
        if length >= 1024 and rng.random() < 0.5:
            length = rng.randint(length // 2, length)
        make, words_per_token = _KINDS[kind]
        questions = rng.randint(4, 32)
        words = max(16, int((length - 64) * words_per_token))
        seed = rng.getrandbits(64)
        plain = rng.random() < 0.1
        head = [] if plain else self._head(rng)
        while True:
            name, sample = make(random.Random(seed), words, questions)
            tokens = head + self._encode(sample.context)
            needed = len(tokens) + sum(len(part) for part in self._turn(0, sample.questions[0], plain))
            if needed <= length or words <= 16:
                break
            share = length / needed
            # Half way when it is close: longer texts have rarer words, so tokens fall faster than words.
            words = max(16, int(words * (share if share < 0.7 else min(0.98, (1 + share) / 2))))
        answers = []
        for number, question in enumerate(sample.questions):
            opening, reply = self._turn(number, question, plain)
            if len(tokens) + len(opening) + len(reply) > length:
                break
            tokens += opening
            answers.append((len(tokens), len(tokens) + len(reply)))
            tokens += reply
            if plain:
                break
        return Row(name, tokens[:length], answers)

    def _turn(self, number: int, question: Question, plain: bool) -> tuple[list[int], list[int]]:
        """Return the tokens of a question, and those of its answer."""
        asked = ("\n\n" if number == 0 else "") + question.text + ("\nAnswer:" if plain else "")
        opening = self._encode(asked)
        if not plain:
            opening = [self._special[USER]] * (number > 0) + opening + [self._special[ASSISTANT]]
        return opening, [*self._encode((" " if plain else "") + question.answer), self._special[END]]

    def _head(self, rng: random.Random) -> list[int]:
        head = [self._special[BEGIN]]
        if rng.random() < 0.1:
            head += [self._special[SYSTEM], *self._encode(rng.choice(_SYSTEM_PROMPTS))]
        return [*head, self._special[USER]]
