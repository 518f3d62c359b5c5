from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow_evaluation.text import Document, TextHaystack

DOCUMENTS = [
    Document("one", "made-up", "prose", "The first sentence.\n\nThe second, which\n  spans lines! And a third?"),
    Document("two", "made-up", "prose", "A heading\n\nThe last sentence of all. "),
]
SENTENCES = [
    "The first sentence.",
    "The second, which spans lines!",
    "And a third?",
    "A heading The last sentence of all.",
]


@given(st.integers(0, 10**6), st.integers(1, 100))
def test_it_gives_as_many_words_as_are_asked_for_of_the_text_going_round(seed: int, words: int) -> None:
    haystack = TextHaystack(DOCUMENTS)
    sentences = haystack(random.Random(seed), words)
    assert haystack(random.Random(seed), words) == sentences
    given_words = " ".join(sentences).split(" ")
    assert len(given_words) == words
    text = " ".join(SENTENCES * 8)
    assert f" {' '.join(given_words)} " in f" {text} "
    assert all(sentence in SENTENCES for sentence in sentences[:-1])


def test_samples_begin_at_different_places() -> None:
    haystack = TextHaystack(DOCUMENTS)
    assert {haystack(random.Random(seed), 3)[0] for seed in range(50)} == {
        " ".join(sentence.split()[:3]) for sentence in SENTENCES
    }


def test_documents_without_words_are_refused() -> None:
    with pytest.raises(ValueError, match="none has a word"):
        TextHaystack([Document("empty", "made-up", "prose", " \n")])
