"""English-like filler text from sentence grammars: what the answers are hidden in."""

from __future__ import annotations

import random
from collections.abc import Callable

from winnow_evaluation.tasks.words import ADJECTIVES, ADVERBS, NAMES, NOUNS, VERBS, participle, past_tense, plural

_PATTERNS = (
    "The {adjective} {noun} {past} the {noun} near the {noun}.",
    "{name} {past} a {adjective} {noun} and {past} it {adverb}.",
    "In the {noun}, the {noun} was {adjective} but the {plural} were {adjective}.",
    "It is {adverb} said that every {noun} has a {adjective} {noun}.",
    "When the {noun} came, {name} {adverb} {past} the {plural}.",
    "There were {adjective} {plural} beside the {noun}, and {name} {past} them.",
    "{name} and {name} {past} the {noun} before they {past} the {adjective} {noun}.",
    "Nobody in the {noun} {past} what the {noun} {past}.",
    "A {noun} without a {noun} is like a {adjective} {noun} without {plural}.",
    "After the {noun} had {past} the {noun}, the {plural} {past} {adverb}.",
    "{name} likes {participle} {adjective} {plural} in the {noun}.",
    "Why would a {noun} {verb} such a {adjective} {noun}?",
    "The {noun} and the {noun} {adverb} {past} {name}.",
    "Under the {adjective} {noun} lay a {noun}, {adjective} and {adjective}.",
    "People who {verb} {plural} {adverb} {verb} a {noun}.",
    "If you {verb} the {noun}, the {noun} will {adverb} {verb} you.",
    "The {plural} of the {noun} are {adjective}, while those of the {noun} are {adjective}.",
    "{name} {past} {adverb}, for the {noun} was {adjective}.",
    "Some {plural} {verb} the {noun}; others {verb} only the {adjective} {noun}.",
    "On the way to the {noun}, a {adjective} {noun} {past} by.",
)

NOISE_PARAGRAPHS = (
    "The river runs to the sea. The wind is cold today. The road is long. We walk on. The day goes by.",
    "Snow lies on the hill. The lamp is lit. The door is open. Come in and sit. Supper is warm.",
    "The clock strikes one. The cat is asleep. The street is empty. Rain falls again. Nothing more happens.",
    "Bread is on the table. The milk is fresh. The sun comes up. Here we are. Off we go once more.",
)
"""Short paragraphs that say nothing; the ``noise`` haystack repeats one of them (RULER's repeats a single one)."""

_WORDS: dict[str, tuple[str, ...]] = {
    "adjective": ADJECTIVES,
    "adverb": ADVERBS,
    "name": NAMES,
    "noun": NOUNS,
    "participle": tuple(participle(verb) for verb in VERBS),
    "past": tuple(past_tense(verb) for verb in VERBS),
    "plural": tuple(plural(noun) for noun in NOUNS),
    "verb": VERBS,
}


def _compile(pattern: str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Split a pattern into its fixed texts and, between them, the word lists of its slots."""
    fixed, *slots = pattern.split("{")
    texts, choices = [fixed], []
    for slot in slots:
        kind, _, text = slot.partition("}")
        choices.append(_WORDS[kind])
        texts.append(text)
    return tuple(texts), tuple(choices)


_COMPILED = tuple(_compile(pattern) for pattern in _PATTERNS)


def sentence(rng: random.Random) -> str:
    """One random sentence."""
    texts, choices = rng.choice(_COMPILED)
    uniform: Callable[[], float] = rng.random
    words = [words[int(uniform() * len(words))] for words in choices]
    return texts[0] + "".join(word + text for word, text in zip(words, texts[1:], strict=True))


def essay(rng: random.Random, words: int) -> list[str]:
    """Random sentences of ``words`` words in all, to within one sentence; at least one sentence."""
    sentences = [sentence(rng)]
    count = sentences[0].count(" ") + 1
    while count < words:
        sentences.append(sentence(rng))
        count += sentences[-1].count(" ") + 1
    return sentences


def noise(rng: random.Random, words: int) -> list[str]:
    """One of ``NOISE_PARAGRAPHS`` repeated to about ``words`` words; at least once."""
    paragraph = rng.choice(NOISE_PARAGRAPHS)
    return [paragraph] * max(1, round(words / (paragraph.count(" ") + 1)))
