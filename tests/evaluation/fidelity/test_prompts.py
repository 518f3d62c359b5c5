"""Prompts that are cut out of documents, or made by the evaluation's tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from winnow_evaluation.fidelity.prompts import from_documents, from_tasks, read_folder
from winnow_evaluation.offline_model import OfflineModel
from winnow_evaluation.task_prompts import make_prompts

CONTEXT, TOKENS = 64, 8
LENGTH = CONTEXT + TOKENS + 1


def _document(model: OfflineModel, tokens: int, letter: str) -> str:
    text = " ".join(f"{letter}{number}" for number in range(tokens))
    assert len(model.encode(text)) >= tokens
    return text


def test_a_prompt_goes_on_as_its_document_does(model: OfflineModel) -> None:
    documents = [_document(model, 2 * LENGTH, "a"), _document(model, LENGTH, "b")]
    prompts = from_documents(model, documents, CONTEXT, TOKENS, 3)
    a, b = (model.encode(document) for document in documents)
    pieces = [[*prompt.tokens, *prompt.following] for prompt in prompts]
    # Each document comes before any comes again.
    assert sorted(pieces[:2]) == sorted([a[:LENGTH], b[:LENGTH]])
    assert pieces[2] in (a[LENGTH : 2 * LENGTH], b[LENGTH : 2 * LENGTH])
    assert {(len(prompt.tokens), len(prompt.following)) for prompt in prompts} == {(CONTEXT, TOKENS + 1)}
    assert prompts == from_documents(model, documents, CONTEXT, TOKENS, 3)


def test_short_documents_are_joined_and_the_last_one_follows(model: OfflineModel) -> None:
    documents = [_document(model, 12, letter) for letter in "abcdefgh"]
    [prompt] = from_documents(model, documents, CONTEXT, TOKENS, 1)
    assert len([*prompt.tokens, *prompt.following]) == LENGTH
    ends = [model.encode(document)[-TOKENS - 1 :] for document in documents]
    assert list(prompt.following) in ends


def test_too_little_text_is_refused(model: OfflineModel) -> None:
    with pytest.raises(ValueError, match=f"has 1 pieces of {LENGTH} tokens; 2 are asked for"):
        from_documents(model, [" ".join(["a"] * LENGTH)], CONTEXT, TOKENS, 2)


def test_tasks_are_followed_by_their_answers(model: OfflineModel) -> None:
    found = from_tasks(model, ["niah_single_1", "vt"], 2048, 6, 3, seed=0)
    made = make_prompts(model, "niah_single_1", 2048, 2, 0)
    assert [list(prompt.tokens) for prompt in (found[0], found[2])] == [list(prompt.tokens) for prompt in made]
    assert list(found[0].following) == [*made[0].answer, *model.end_tokens][:7]
    assert len(found) == 3


def test_prompts_fit_their_length_and_are_the_same_for_the_same_seed(model: OfflineModel) -> None:
    prompts = make_prompts(model, "niah_single_1", 2048, 2, seed=3)
    assert prompts == make_prompts(model, "niah_single_1", 2048, 2, seed=3)
    assert all(0.8 * 2048 < len(prompt.tokens) + len(prompt.answer) <= 2048 for prompt in prompts)
    with pytest.raises(ValueError, match="niah_single_1: needs at least"):
        make_prompts(model, "niah_single_1", 64, 1, seed=3)


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden"):
        (tmp_path / name).write_text(name)
    assert read_folder(tmp_path) == ["a.txt", "b.txt", "sub/c.txt"]


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no files"):
        read_folder(tmp_path)
    (tmp_path / "a").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not text in UTF-8"):
        read_folder(tmp_path)
