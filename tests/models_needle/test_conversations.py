"""Rows of training text: which of their tokens are answers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from needle_training import conversations
from needle_training.conversations import Conversations
from needle_training.tokenizer import ASSISTANT, BEGIN, END, SYSTEM, USER
from needle_training.train import Plan, TextStage, _length_at, _text_batch, text_batches
from winnow_evaluation.tasks.sample import Sample

KINDS = list(conversations._KINDS)

kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**64 - 1)


class _Made:
    """The conversations, and the sample that the last row was made from."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.conversations = Conversations(tokenizer)
        self.sample = Sample("", ())
        for kind in KINDS:
            monkeypatch.setitem(conversations._KINDS, kind, self._watched(*conversations._KINDS[kind]))

    def _watched(self, make: conversations._Maker, words: float) -> tuple[conversations._Maker, float]:
        def watched(rng: random.Random, size: int, questions: int) -> tuple[str, Sample]:
            name, self.sample = make(rng, size, questions)
            return name, self.sample

        return watched, words


@pytest.fixture(scope="module")
def made(tokenizer: Tokenizer) -> Iterator[_Made]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield _Made(tokenizer, monkeypatch)


@settings(max_examples=150)
@given(kind=kinds, seed=seeds, length=st.integers(128, 3000))
def test_the_ranges_hold_the_answers_and_their_end(
    made: _Made, tokenizer: Tokenizer, kind: str, seed: int, length: int
) -> None:
    row = made.conversations.row(random.Random(seed), kind, length)
    assert len(row.tokens) <= length
    if length >= 1024:
        assert row.answers
    plain = row.tokens[0] != tokenizer.token_to_id(BEGIN)
    asked = made.sample.questions
    for question, (start, end) in zip(asked, row.answers, strict=False):
        assert 0 < start < end <= len(row.tokens)
        text = tokenizer.decode(row.tokens[start:end], skip_special_tokens=False)
        assert text == (" " if plain else "") + question.answer + END
        before = tokenizer.decode(row.tokens[:start], skip_special_tokens=False)
        assert before.endswith(question.text + ("\nAnswer:" if plain else ASSISTANT))
    assert len(row.answers) <= (1 if plain else len(asked))


@settings(max_examples=60)
@given(kind=kinds, seed=seeds)
def test_a_row_is_what_the_chat_template_would_give_or_plain_text(
    made: _Made, tokenizer: Tokenizer, kind: str, seed: int
) -> None:
    row = made.conversations.row(random.Random(seed), kind, 1500)
    text = tokenizer.decode(row.tokens, skip_special_tokens=False)
    pairs = made.sample.questions[: len(row.answers)]
    first, *others = pairs
    if text.startswith(BEGIN):
        head = text[: text.index(USER) + len(USER)]
        assert head == BEGIN + USER or head in {
            BEGIN + SYSTEM + system + USER for system in conversations._SYSTEM_PROMPTS
        }
        rest = "".join(f"{USER}{pair.text}{ASSISTANT}{pair.answer}{END}" for pair in others)
        assert text == f"{head}{made.sample.context}\n\n{first.text}{ASSISTANT}{first.answer}{END}{rest}"
    else:
        assert text == f"{made.sample.context}\n\n{first.text}\nAnswer: {first.answer}{END}"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_fill_their_length(made: _Made, kind: str) -> None:
    lengths = [len(made.conversations.row(random.Random(seed), kind, 4096).tokens) for seed in range(30)]
    assert max(lengths) <= 4096
    assert max(lengths) > 0.75 * 4096
    # Every other row is cut, by half at most; a list of records may be as short as a tenth of that.
    assert min(lengths) < 0.7 * 4096
    assert min(lengths) > (0.04 if kind == "records" else 0.4) * 4096


@settings(max_examples=40)
@given(kind=kinds, seed=seeds)
def test_the_same_seed_gives_the_same_row(made: _Made, kind: str, seed: int) -> None:
    make = made.conversations.row
    assert make(random.Random(seed), kind, 700) == make(random.Random(seed), kind, 700)


def test_a_batch_weighs_the_answers_alone() -> None:
    kinds = Plan().kinds
    batch = _text_batch(0, 5, 1024, 12, kinds)
    assert batch.tokens.shape == batch.weights.shape == (12, 1024)
    for weights, first in zip(batch.weights, batch.first_answers, strict=True):
        learned = weights > 0
        assert np.allclose(weights[learned], learned.sum() ** -0.5)
        assert first is not None
        _, start, end = first
        assert learned[start:end].all()
        assert not learned[:start].any()
    assert len({first[0] for first in batch.first_answers if first}) > 2


def test_batches_are_the_same_from_wherever_they_resume() -> None:
    stages = (TextStage(1, {64: 1.0}), TextStage(3, {128: 1.0, 256: 1.0}), TextStage(1, {512: 1.0}))
    plan = Plan(text=stages, text_tokens=1024)
    lengths = [_length_at(plan, step) for step in range(plan.text_steps())]
    assert lengths[0] == 64
    assert set(lengths[1:4]) == {128, 256}
    assert lengths[4] == 512
    for step, batch in enumerate(text_batches(plan, 2, workers=1), 2):
        alone = _text_batch(plan.seed, step, lengths[step], 1024 // lengths[step], plan.kinds)
        assert np.array_equal(batch.tokens, alone.tokens)
        assert np.array_equal(batch.weights, alone.weights)
        assert batch.first_answers == alone.first_answers
        last = step
    assert last == 4
