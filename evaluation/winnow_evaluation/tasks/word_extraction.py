"""Word extraction (RULER, section 3.3): the most common words of a list, the most frequent of a coded text."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from winnow_evaluation.tasks.sample import Question, Sample, Task
from winnow_evaluation.tasks.words import compound_words, distinct

COMMON_WORDS = 10
FREQUENT_WORDS = 3
ZETA_2 = 1.6449340668482264
SHORT_LIST = 700
"""Words below which a list has RULER's parameters for contexts under 4,096 tokens."""

_COMMON_INTRODUCTIONS = (
    "Here is a numbered list of words. A few of them come up far more often than the others.",
    "Below stands a numbered list of words; find out which words it repeats most.",
    "Look through this numbered list. Some words appear in it much more often than the rest.",
)
_COMMON_QUESTIONS = (
    "What are the 10 most common words in the list above?",
    "Which 10 words appear most often in the list?",
    "Name the 10 words that the list repeats most.",
)
_FREQUENT_INTRODUCTIONS = (
    "The text below is in code. Watch how often each coded word turns up, and do not mind the dots.",
    "Read this coded text and count its words. The dots '...' mean nothing.",
    "Below is a coded text. Keep track of how often every coded word occurs; leave the dots aside.",
)
_FREQUENT_QUESTIONS = (
    "What are the three most frequent words in the coded text above?",
    "Which three coded words appear most often?",
    "Name the three words that the coded text uses most.",
)


def make_common(rng: random.Random, size: int) -> Sample:
    """``cwe``: 10 words 30 times each among words that come 3 times each (6 times and once in a short list).

    The words are drawn from the whole vocabulary, so that in one sample of some 250 a word of the question is
    one of the ten: the tokenizer of the model that ships was trained on these samples, which therefore stay.
    """
    listed, common = common_words(rng, size, *((6, 1) if size < SHORT_LIST else (30, 3)))
    context = rng.choice(_COMMON_INTRODUCTIONS) + "\n\n" + numbered(listed)
    question = Question(rng.choice(_COMMON_QUESTIONS), "They are " + ", ".join(common), tuple(common))
    return Sample(context, (question,))


def make_frequent(rng: random.Random, size: int) -> Sample:
    """``fwe``: coded words whose frequency falls as rank⁻² (zeta, α = 2); rank 1 is dots, ranks 2 to 4 the answer."""
    listed, answers = frequent_words(rng, size)
    context = rng.choice(_FREQUENT_INTRODUCTIONS) + "\n\n" + " ".join(listed)
    question = Question(rng.choice(_FREQUENT_QUESTIONS), "They are " + ", ".join(answers), tuple(answers))
    return Sample(context, (question,))


def common_words(rng: random.Random, size: int, common_times: int, other_times: int) -> tuple[list[str], list[str]]:
    """A list of about ``size`` words in random order, and the ten of them that it repeats most, in its order."""
    others = max(COMMON_WORDS, (size - COMMON_WORDS * common_times) // other_times)
    words = compound_words(rng, COMMON_WORDS + others)
    rng.shuffle(words)
    common = words[:COMMON_WORDS]
    listed = common * common_times + words[COMMON_WORDS:] * other_times
    rng.shuffle(listed)
    first_seen = {word: place for place, word in reversed(list(enumerate(listed)))}
    return listed, sorted(common, key=first_seen.__getitem__)


def frequent_words(rng: random.Random, size: int) -> tuple[list[str], list[str]]:
    """About ``size`` coded words and dots in random order, and the three most frequent words."""
    count = max(size, 120)
    ranks = max(FREQUENT_WORDS + 2, count // 12)
    coded = distinct(lambda: "".join(rng.choices(string.ascii_lowercase, k=6)), ranks - 1)
    vocabulary = ["...", *coded]
    listed = [word for rank, word in enumerate(vocabulary, 1) for _ in range(int(count / (ZETA_2 * rank * rank)))]
    rng.shuffle(listed)
    return listed, vocabulary[1 : 1 + FREQUENT_WORDS]


def numbered(words: Sequence[str]) -> str:
    """The words as a list that begins with ``1.``, in one line."""
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))


TASKS = [
    Task("cwe", "the 10 most common words of a numbered list", make_common, answer_tokens=lambda _size: 120),
    Task("fwe", "the 3 most frequent words of a coded text", make_frequent, answer_tokens=lambda _size: 60),
]
