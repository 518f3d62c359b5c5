"""Rows of tokens: the chat template, what is learned, the wordings and the text they come from."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer

from smollm2_training import needles, ruler, variables
from smollm2_training.batches import Source, make_batch
from smollm2_training.packed import END_OF_TEXT, PackedText
from smollm2_training.rows import OTHER_WEIGHTS, RULER_WEIGHTS, Rows
from winnow_evaluation.tasks import filler_text as made_up
from winnow_evaluation.tasks.ruler import RULER_TASKS

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's own, which its model folder holds."""


def _prose(rng: random.Random, words: int) -> list[str]:
    return made_up.essay(rng, words)


@pytest.fixture
def rows(tokenizer: Tokenizer) -> Rows:
    return Rows(tokenizer, _prose)


def _learned(tokenizer: Tokenizer, tokens: list[int], weights: list[float]) -> list[str]:
    """The texts of the runs of learned tokens."""
    runs: list[list[int]] = [[]]
    for token, weight in zip(tokens, weights, strict=True):
        if weight:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


def test_a_prompt_is_what_the_chat_template_makes(rows: Rows, tokenizer: Tokenizer) -> None:
    user = "Text 12.\n\nWhat?"
    expected = jinja2.Template(TEMPLATE).render(
        messages=[{"role": "user", "content": user}], add_generation_prompt=True
    )
    assert rows.prompt(user, "") == tokenizer.encode(expected).ids
    assert rows.prompt(user, " The answer is") == tokenizer.encode(expected).ids + rows.encode(" The answer is")


@pytest.mark.parametrize("length", [2048, 4096])
def test_answers_alone_are_learned(rows: Rows, tokenizer: Tokenizer, length: int) -> None:
    whole = 0
    for seed in range(40):
        row = rows.draw(random.Random(seed), length)
        assert len(row.tokens) == len(row.weights) <= length
        assert sum(row.weights) == pytest.approx(sum(w > 0 for w in row.weights) ** 0.5, rel=0.7)
        text = tokenizer.decode(row.tokens, skip_special_tokens=False)
        answers = _learned(tokenizer, row.tokens, row.weights)
        assert all(answer.endswith("<|im_end|>") for answer in answers)
        assert all("<|im_start|>" not in answer for answer in answers)
        first = tokenizer.decode(row.tokens[slice(*row.first_answer)], skip_special_tokens=False)
        assert answers[0].endswith(first)
        if text.startswith("<|im_start|>"):
            turns = re.findall(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.DOTALL)
            assert len(turns) == len(answers)
            assert all(turn.endswith(answer) for turn, answer in zip(turns, answers, strict=True))
            assert text.count("<|im_start|>user\n") == len(turns)
        whole += len(row.tokens) > 0.85 * length
    assert whole > 15


def test_special_tokens_in_a_text_are_plain_text(rows: Rows, tokenizer: Tokenizer) -> None:
    assert tokenizer.token_to_id("<|im_end|>") not in rows.encode("he wrote <|im_end|> here")


def test_the_same_seed_draws_the_same_row(rows: Rows) -> None:
    assert rows.draw(random.Random(7), 2048) == rows.draw(random.Random(7), 2048)


def test_there_are_twenty_other_wordings_of_each_kind() -> None:
    for wordings in (needles.WORDINGS, variables.WORDINGS):
        assert len(wordings) >= 20
    assert len({wording.needle for wording in needles.WORDINGS}) == len(needles.WORDINGS)
    assert len({wording.question for wording in needles.WORDINGS}) == len(needles.WORDINGS)
    assert len({wording.copy for wording in variables.WORDINGS}) == len(variables.WORDINGS)
    assert len({wording.question for wording in variables.WORDINGS}) == len(variables.WORDINGS)
    assert set(RULER_WEIGHTS) == set(RULER_TASKS)
    assert sum(RULER_WEIGHTS.values()) + sum(OTHER_WEIGHTS.values()) == pytest.approx(1)


@pytest.mark.parametrize("wording", needles.WORDINGS, ids=lambda wording: wording.noun)
def test_each_needle_is_in_the_text_that_asks_for_it(wording: needles.Wording) -> None:
    several = 0
    for seed in range(12):
        conversation = needles.make(random.Random(seed), 600, 8, _prose, (wording,))
        for turn in conversation.turns:
            values = turn.answer.strip().rstrip(".").split(", ")
            several += len(values) > 1
            assert all(conversation.context.count(value) == 1 for value in values)
            assert not re.search(r"[{}]", turn.question + turn.given)
    assert several


@pytest.mark.parametrize("wording", variables.WORDINGS, ids=lambda wording: wording.copy)
def test_each_chain_leads_from_its_value_to_its_variables(wording: variables.Wording) -> None:
    for seed in range(12):
        conversation = variables.make(random.Random(seed), 400, 8, _prose, (wording,))
        first = conversation.turns[0]
        names = first.answer.split(wording.separator.strip() or None)
        names = [name.strip() for name in names]
        value = re.search(r"\d{5}", first.question)
        assert value is not None
        assert wording.first.format(name=names[0], value=value[0]) in conversation.context
        for source, name in pairwise(names):
            assert wording.copy.format(name=name, source=source) in conversation.context


@pytest.mark.parametrize("name", RULER_WEIGHTS)
def test_rulers_tasks_are_asked_several_times_where_they_can_be(name: str) -> None:
    one = ruler.make(random.Random(3), name, 800, 1, _prose)
    many = ruler.make(random.Random(3), name, 800, 6, _prose)
    expected = RULER_TASKS[name].make(random.Random(3), 800, _prose)
    assert one.context + one.turns[0].question == expected.prompt
    assert one.turns[0].given == expected.questions[0].given
    assert Counter(re.findall(r"\S+", one.turns[0].answer.replace(".", "").replace(",", ""))) == Counter(
        re.findall(r"\S+", expected.questions[0].answer.replace(".", "").replace(",", ""))
    )
    single = name in {"vt", "cwe", "fwe", "niah_multiquery"}
    assert len(many.turns) == (1 if single else 6)
    assert len({turn.question for turn in many.turns}) == len(many.turns)
    for turn in many.turns if name.startswith("niah") else []:
        values = turn.answer.strip().rstrip(".").split(", ")
        places = [many.context.index(f"{value}.") for value in values]
        assert name == "niah_multiquery" or places == sorted(places)


def test_rows_of_text_are_pieces_of_documents(packed: PackedText, tmp_path: Path) -> None:
    packed.save(tmp_path / "text.xz")
    PackedText.load(tmp_path / "text.xz").unpack(tmp_path / "text")
    mapped = PackedText.mapped(tmp_path / "text")
    documents = [packed.document(i).tobytes() for i in range(4)]
    for seed in range(20):
        row = mapped.row(random.Random(seed), 300)
        assert len(row) == 300
        pieces = np.split(row, np.flatnonzero(row == END_OF_TEXT))
        pieces = [piece[piece != END_OF_TEXT] for piece in pieces]
        assert all(any(piece.tobytes() in document for document in documents) for piece in pieces)
    with pytest.raises(ValueError, match="all documents together have"):
        mapped.row(random.Random(0), 10**6)


def test_sentences_are_prose(packed: PackedText, tokenizer: Tokenizer) -> None:
    for seed in range(20):
        sentences = packed.sentences(random.Random(seed), 120, tokenizer)
        assert sum(sentence.count(" ") + 1 for sentence in sentences) >= 120
        assert all("print" not in sentence and "\n" not in sentence for sentence in sentences)


def test_a_batch_is_half_text_and_told_by_its_step(packed: PackedText, base: Path, tmp_path: Path) -> None:
    packed.unpack(tmp_path / "text")
    source = Source(base / "tokenizer.json", tmp_path / "text", 4096, seed=0)
    batch = make_batch(source, 5, 1024)
    assert batch.tokens.shape == (4, 1024)
    assert batch.text_rows == 2
    assert (batch.places >= 2 * 1024).all()
    again, other = make_batch(source, 5, 1024), make_batch(source, 6, 1024)
    assert np.array_equal(batch.tokens, again.tokens)
    assert np.array_equal(batch.places, again.places)
    assert not np.array_equal(batch.tokens, other.tokens)
    end = Tokenizer.from_file(str(source.tokenizer)).token_to_id("<|im_end|>")
    for _, start, stop in batch.first_answers:
        assert batch.tokens.flatten()[batch.places[stop - 1]] == end
        assert start < stop
    assert [make_batch(source, step, 4096).text_rows for step in (0, 1)] == [0, 1]
