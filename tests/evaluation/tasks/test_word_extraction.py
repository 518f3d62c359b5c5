"""Word extraction: count the words of the context."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow_evaluation.tasks import word_extraction
from winnow_evaluation.tasks.sample import Sample

seeds = st.integers(0, 2**64 - 1)


def _body(context: str) -> str:
    return context.split("\n\n", 1)[1]


@given(seeds, st.one_of(st.integers(1, 2000), st.sampled_from([699, 700, 701, 6000])))
def test_the_common_words_come_far_more_often_than_the_others(seed: int, size: int) -> None:
    sample = word_extraction.make_common(random.Random(seed), size)
    numbers, listed = zip(*re.findall(r"(\d+)\. ([a-z]+)", _body(sample.context)), strict=True)
    assert [int(number) for number in numbers] == list(range(1, len(listed) + 1))
    assert " ".join(f"{number}. {word}" for number, word in zip(numbers, listed, strict=True)) == _body(sample.context)

    (question,) = sample.questions
    common = set(question.references)
    common_times, other_times = (6, 1) if size < 700 else (30, 3)
    counts = Counter(listed)
    assert len(question.references) == len(common) == 10
    assert {counts[word] for word in common} == {common_times}
    assert {count for word, count in counts.items() if word not in common} == {other_times}
    assert len(counts) >= 20
    # The answer is in an order that a reader can follow: that of their first appearance.
    assert list(question.references) == [word for word in dict.fromkeys(listed) if word in common]
    assert question.answer == "They are " + ", ".join(question.references)


@given(seeds, st.integers(1, 4000))
def test_the_frequencies_of_coded_words_fall_as_the_square_of_their_rank(seed: int, size: int) -> None:
    sample = word_extraction.make_frequent(random.Random(seed), size)
    counts = Counter(_body(sample.context).split())
    (dots, dots_count), *ranked = counts.most_common()
    assert dots == "..."
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)

    (question,) = sample.questions
    assert list(question.references) == [word for word, _ in ranked[:3]]
    assert dots_count > ranked[0][1] > ranked[1][1] > ranked[2][1] > ranked[3][1]
    assert question.answer == "They are " + ", ".join(question.references)

    zeta_2 = math.pi**2 / 6
    total = max(size, 120)
    expected = [int(total / (zeta_2 * rank**2)) for rank in range(1, len(counts) + 1)]
    assert [dots_count, *(count for _, count in ranked)] == expected


@pytest.mark.parametrize("make", [word_extraction.make_common, word_extraction.make_frequent])
def test_the_answers_are_spread_over_the_text(make: Callable[[random.Random, int], Sample]) -> None:
    sample = make(random.Random(0), 2000)
    body = _body(sample.context)
    for reference in sample.questions[0].references:
        places = [match.start() / len(body) for match in re.finditer(rf"\b{reference}\b", body)]
        assert min(places) < 0.25
        assert max(places) > 0.75
