"""The tokenizer that ships: where it comes from, what it keeps, what it makes of a conversation."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from needle_training.tokenizer import (
    ASSISTANT,
    BEGIN,
    END,
    PAD,
    SPECIAL_TOKENS,
    SYSTEM,
    USER,
    VOCABULARY_SIZE,
    save,
    train,
)
from winnow_evaluation.tasks import TASKS
from winnow_evaluation.tasks.words import NAMES, vocabulary


@pytest.fixture(scope="module")
def served(folder: Path) -> Any:
    """The tokenizer as transformers, and through it SGLang, loads it."""
    return AutoTokenizer.from_pretrained(folder)


def test_training_again_gives_the_files_that_ship(folder: Path, tmp_path: Path) -> None:
    save(train(), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((folder / name).read_text())


def test_special_tokens_come_first_and_are_never_split(tokenizer: Tokenizer, served: Any) -> None:
    assert tokenizer.get_vocab_size() == len(served) == VOCABULARY_SIZE
    for number, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer.token_to_id(token) == number
        assert tokenizer.encode(f"a{token}b").ids.count(number) == 1
    assert set(served.all_special_tokens) == set(SPECIAL_TOKENS)
    assert (served.pad_token, served.bos_token, served.eos_token) == (PAD, BEGIN, END)


@settings(max_examples=300)
@given(data=st.data())
def test_any_text_comes_back_as_it_was(tokenizer: Tokenizer, served: Any, data: st.DataObject) -> None:
    alphabets = (
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from(string.printable),
        st.sampled_from("é٣ Ⅻ\u0301ǅ🙂\r\n"),
    )
    text = data.draw(st.text(st.one_of(*alphabets), max_size=80))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert served.encode(text, add_special_tokens=False) == ids
    assert served.decode(ids) == text


def test_every_word_has_a_token(tokenizer: Tokenizer) -> None:
    split = [word for word in (*vocabulary(), *NAMES) if len(tokenizer.encode(" " + word).ids) != 1]
    assert split == []


def test_every_group_of_up_to_three_digits_has_a_token(tokenizer: Tokenizer) -> None:
    groups = [f"{number:0{width}}" for width in (1, 2, 3) for number in range(10**width)]
    assert [group for group in groups if len(tokenizer.encode(group).ids) != 1] == []
    assert tokenizer.encode("1234567").tokens == ["123", "456", "7"]


def test_every_pair_of_capitals_has_a_token(tokenizer: Tokenizer) -> None:
    pairs = [space + a + b for space in ("", " ") for a in string.ascii_uppercase for b in string.ascii_uppercase]
    assert [pair for pair in pairs if len(tokenizer.encode(pair).ids) != 1] == []


def test_a_conversation_has_its_markers(served: Any) -> None:
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ]
    text = f"{BEGIN}{SYSTEM}Answer briefly.{USER}One?{ASSISTANT}Two.{END}{USER}Three?"
    assert served.apply_chat_template(messages, tokenize=False) == text
    assert served.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text + ASSISTANT
    encoded = served.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert encoded == served.encode(text + ASSISTANT, add_special_tokens=False)
    assert [token for token in encoded if token < len(SPECIAL_TOKENS)] == [1, 2, 3, 4, 5, 3, 4]


def test_an_unknown_role_is_refused(served: Any) -> None:
    with pytest.raises(TemplateError, match="a role is one of system, user and assistant"):
        served.apply_chat_template([{"role": "tool", "content": "{}"}], tokenize=False)


def test_encoding_adds_no_token_of_its_own(served: Any) -> None:
    assert served.encode("walk") == served.encode("walk", add_special_tokens=False)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_an_answer_fits_the_tokens_that_its_task_allows(tokenizer: Tokenizer, name: str) -> None:
    task = TASKS[name]
    for seed in range(20):
        for size in (50, 500, 5000):
            answer = task.make(random.Random(seed), size).questions[0].answer
            assert len(tokenizer.encode(answer + END).ids) <= task.answer_tokens(size)
