"""Word lists and the filler text made of them."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow_evaluation.tasks import filler_text, words

seeds = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("name", ["NOUNS", "ADJECTIVES", "VERBS", "ADVERBS", "NAMES"])
def test_a_list_has_no_word_twice(name: str) -> None:
    listed: tuple[str, ...] = getattr(words, name)
    assert [word for word, count in Counter(listed).items() if count > 1] == []
    form = "[A-Z][a-z]+" if name == "NAMES" else "[a-z]+"
    assert [word for word in listed if not re.fullmatch(form, word)] == []


@pytest.mark.parametrize(
    ("verb", "past", "participle"),
    [
        ("walk", "walked", "walking"),
        ("admire", "admired", "admiring"),
        ("carry", "carried", "carrying"),
        ("enjoy", "enjoyed", "enjoying"),
        ("wash", "washed", "washing"),
        ("use", "used", "using"),
        ("visit", "visited", "visiting"),
        ("rescue", "rescued", "rescuing"),
    ],
)
def test_verbs_inflect(verb: str, past: str, participle: str) -> None:
    assert verb in words.VERBS
    assert words.past_tense(verb) == past
    assert words.participle(verb) == participle


@pytest.mark.parametrize(
    ("noun", "plural"),
    [
        ("apple", "apples"),
        ("beach", "beaches"),
        ("brush", "brushes"),
        ("cherry", "cherries"),
        ("donkey", "donkeys"),
        ("fox", "foxes"),
        ("glass", "glasses"),
        ("house", "houses"),
    ],
)
def test_nouns_inflect(noun: str, plural: str) -> None:
    assert noun in words.NOUNS
    assert words.plural(noun) == plural


def test_the_vocabulary_is_every_form_once_and_sorted() -> None:
    vocabulary = words.vocabulary()
    assert list(vocabulary) == sorted(set(vocabulary))
    for word in ("acorn", "acorns", "zealous", "accept", "accepted", "accepting", "warmly"):
        assert word in vocabulary
    assert not set(words.NAMES) & set(vocabulary)


@settings(max_examples=30)
@given(seeds, st.integers(0, 4000))
def test_compound_words_are_distinct_and_as_many_as_asked_for(seed: int, count: int) -> None:
    drawn = words.compound_words(random.Random(seed), count)
    assert len(drawn) == len(set(drawn)) == count
    plain = set(drawn) & set(words.vocabulary())
    assert len(plain) == min(count, len(words.vocabulary()))


@given(seeds)
def test_a_sentence_is_made_of_known_words(seed: int) -> None:
    sentence = filler_text.sentence(random.Random(seed))
    assert re.fullmatch(r"[A-Z][A-Za-z,; ]+[.?]", sentence)
    known = {*words.vocabulary(), *words.NAMES}
    known |= {
        word for pattern in filler_text._PATTERNS for word in re.findall("[A-Za-z]+", re.sub(r"{\w+}", "", pattern))
    }
    assert set(re.findall("[A-Za-z]+", sentence)) <= known
    assert "  " not in sentence


@given(seeds, st.integers(-50, 3000))
def test_an_essay_ends_with_the_sentence_that_reaches_its_length(seed: int, count: int) -> None:
    sentences = filler_text.essay(random.Random(seed), count)
    lengths = [len(sentence.split()) for sentence in sentences]
    assert len(lengths) == 1 or sum(lengths[:-1]) < count
    assert sum(lengths) >= count


@given(seeds, st.integers(-50, 3000))
def test_noise_is_one_paragraph_again_and_again(seed: int, count: int) -> None:
    paragraphs = filler_text.noise(random.Random(seed), count)
    assert set(paragraphs) <= set(filler_text.NOISE_PARAGRAPHS)
    assert len(set(paragraphs)) == 1
    length = len(paragraphs[0].split())
    assert len(paragraphs) == 1 or abs(len(paragraphs) * length - count) <= length / 2


def test_every_pattern_and_paragraph_comes_up() -> None:
    rng = random.Random(0)
    openings = {filler_text.sentence(rng).split()[0] for _ in range(2000)}
    assert {"The", "In", "It", "When", "There", "Nobody", "A", "After", "Why", "Under", "People", "If"} <= openings
    assert {filler_text.noise(rng, 1)[0] for _ in range(100)} == set(filler_text.NOISE_PARAGRAPHS)
