from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow_evaluation.text import Document, TextError, load_text, text_folder
from winnow_evaluation.text.documents import KINDS, LONG_CHARACTERS, SPLITS, collection, write_collection

texts = st.text(st.characters(exclude_categories=["Cs"]))


def test_every_document_comes_back_in_its_split_and_order(tmp_path: Path) -> None:
    documents = [
        Document(f"page-{number}", "made-up", kind, f"Line\u2028{number}\n") for number in range(60) for kind in KINDS
    ]
    write_collection(tmp_path, documents, {"sha256": "digest"})
    loaded = {(kind, split): load_text(split, kind, tmp_path) for kind in KINDS for split in SPLITS}
    for (kind, split), found in loaded.items():
        assert found == tuple(each for each in documents if (each.kind, each.split) == (kind, split))
        assert found
    assert collection(tmp_path) == {"sha256": "digest"}


@given(st.text(min_size=1), st.text(min_size=1), texts)
def test_the_split_depends_on_the_identity_alone(name: str, source: str, text: str) -> None:
    assert Document(name, source, "prose", text).split == Document(name, source, "code", "").split


def test_a_fifth_is_held_out() -> None:
    splits = Counter(Document(str(number), "made-up", "prose", "").split for number in range(10_000))
    assert splits["test"] == pytest.approx(1500, abs=150)
    assert splits["validation"] == pytest.approx(500, abs=100)


def test_a_document_of_32k_tokens_is_long() -> None:
    assert not Document("name", "source", "prose", "a" * (LONG_CHARACTERS - 1)).long
    assert Document("name", "source", "prose", "a" * LONG_CHARACTERS).long


def test_a_folder_whose_writing_was_broken_off_has_no_text(tmp_path: Path) -> None:
    write_collection(tmp_path, [], {})
    with pytest.raises(TypeError):
        write_collection(tmp_path, [Document("name", "source", "prose", object())], {})  # type: ignore[arg-type]
    with pytest.raises(TextError, match="run 'winnow text collect' first"):
        load_text("train", "prose", tmp_path)


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WINNOW_CACHE_DIR", str(tmp_path))
    assert text_folder() == tmp_path / "text"
    monkeypatch.delenv("WINNOW_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert text_folder() == tmp_path / "cache" / "winnow" / "text"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert text_folder() == tmp_path / "home" / ".cache" / "winnow" / "text"
