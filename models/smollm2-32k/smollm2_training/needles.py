"""Needles in haystacks, in wordings that RULER does not use."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from smollm2_training.turns import Conversation, Turn
from winnow_evaluation.tasks import filler_text
from winnow_evaluation.tasks.words import ADJECTIVES, NAMES, NOUNS

Prose = Callable[[random.Random, int], list[str]]
"""``prose(rng, words)`` is real text of about ``words`` words in sentences."""


@dataclass(frozen=True)
class Wording:
    """One way to hide values under keys and to ask for them.

    Attributes:
        noun, nouns: what a value is called, once and in the plural.
        before: what stands before the text.
        needle: the sentence that tells one value of one key.
        question, several: the question for one value, and for several values or keys.
        given, given_several: how the answer begins; empty for an answer that is the values alone.
    """

    noun: str
    nouns: str
    before: str
    needle: str
    question: str
    several: str
    given: str = ""
    given_several: str = ""


WORDINGS = (
    Wording(
        "access code",
        "access codes",
        "Somewhere in the following pages there are {nouns}. Note them while you read.",
        "The {noun} of {key} is {value}.",
        "What is the {noun} of {key}?",
        "What are all the {nouns} of {key}?",
        "The {noun} of {key} is",
        "The {nouns} of {key} are",
    ),
    Wording(
        "serial number",
        "serial numbers",
        "Read the document below. Afterwards you will have to name {nouns} that it contains.",
        "Please note: {key} carries the {noun} {value}.",
        "Which {noun} does {key} carry?",
        "Which {nouns} do the following carry: {key}?",
        "{key} carries the {noun}",
        "The {nouns} carried by {key} are",
    ),
    Wording(
        "secret",
        "secrets",
        "Here is a text in which {nouns} are hidden.",
        "({key} keeps the {noun} {value}.)",
        "{key}: which {noun}?",
        "{key}: which {nouns}?",
    ),
    Wording(
        "reference",
        "references",
        "I am going to give you a long text. It mentions a few {nouns}, and I need them later.",
        "For {key}, use the {noun} {value}.",
        "Give me the {noun} to use for {key}.",
        "Give me every one of the {nouns} to use for {key}.",
        "For {key}, use",
        "For {key}, use these:",
    ),
    Wording(
        "password",
        "passwords",
        "Context:",
        "Remember that {value} is the {noun} for {key}.",
        "Question: according to the context, what is the {noun} for {key}?",
        "Question: according to the context, what are the {nouns} for {key}?",
        "Answer:",
        "Answer:",
    ),
    Wording(
        "ticket",
        "tickets",
        "Below you find notes from several sources. {nouns} are written in between.",
        "{key} was issued {noun} {value}.",
        "Find the {noun} that was issued to {key}.",
        "Find all {nouns} that were issued to {key}.",
        "{key} was issued {noun}",
        "{key} was issued {nouns}",
    ),
    Wording(
        "lucky number",
        "lucky numbers",
        "Read carefully, people's {nouns} are mentioned in passing.",
        "By the way, the {noun} that {key} swears by is {value}.",
        "By which {noun} does {key} swear?",
        "List the {nouns} by which {key} swear.",
        "{key} swears by",
        "They swear by",
    ),
    Wording(
        "entry",
        "entries",
        "The text between here and the question holds records of the form key -> value.",
        "{key} -> {value}",
        "{key} -> ?",
        "Give all {nouns} on the right-hand side of {key}.",
    ),
    Wording(
        "identifier",
        "identifiers",
        "You are given a long report.",
        "In the register, {key} is listed under the {noun} {value}.",
        "Under which {noun} does the report list {key}?",
        "Under which {nouns} does the report list {key}?",
        "The report lists {key} under",
        "The report lists {key} under",
    ),
    Wording(
        "phone extension",
        "phone extensions",
        "This file has the {nouns} of several people and things among other text.",
        "You can reach {key} at {noun} {value}.",
        "At which {noun} can I reach {key}?",
        "At which {nouns} can I reach {key}?",
        "You can reach {key} at {noun}",
        "You can reach {key} at {nouns}",
    ),
    Wording(
        "value",
        "values",
        "Configuration and commentary, mixed. Look only at the settings.",
        'set "{key}" = "{value}"',
        'What is "{key}" set to?',
        "What are these set to: {key}?",
    ),
    Wording(
        "combination",
        "combinations",
        "Several safes are described in this text, each with its {noun}.",
        "The safe called {key} opens with the {noun} {value}.",
        "With which {noun} does the safe called {key} open?",
        "With which {nouns} do the safes called {key} open?",
        "It opens with the {noun}",
        "The {nouns} are",
    ),
    Wording(
        "parcel",
        "parcels",
        "The following is a log. Most of it does not matter; the {nouns} do.",
        "Delivered to {key}: {noun} {value}.",
        "Name the {noun} delivered to {key}.",
        "Name each of the {nouns} delivered to {key}.",
        "Delivered to {key}:",
        "Delivered to {key}:",
    ),
    Wording(
        "member number",
        "member numbers",
        "Long text ahead. I hid {nouns} in it, let us see whether you find them.",
        "It is known that {key} has been given {value} as a {noun}.",
        "I hid the {noun} of {key}. What is it?",
        "I hid the {nouns} of {key}. What are they?",
        "I found it:",
        "I found them:",
    ),
    Wording(
        "magic word",
        "magic words",
        "Memorize the {nouns} in this text.",
        "A {noun} for {key}: {value}.",
        "Tell me the {noun} for {key} in the text above.",
        "Tell me all {nouns} for {key} in the text above.",
        "The {noun} for {key} in the text above is",
        "The {nouns} for {key} in the text above are",
    ),
    Wording(
        "key",
        "keys",
        "Text:",
        "Whoever asks for {key} shall be told {value}.",
        "I ask for {key}.",
        "I ask for {key}. Tell me everything that I shall be told.",
    ),
    Wording(
        "tag",
        "tags",
        "An archivist went through this text and left {nouns} in it.",
        "[{noun} {key}: {value}]",
        "Read out the {noun} {key}.",
        "Read out the {nouns} {key}.",
        "[{noun} {key}:",
        "They read",
    ),
    Wording(
        "order",
        "orders",
        "This correspondence mentions {nouns}.",
        "We have booked {noun} {value} in the name of {key}.",
        "Which {noun} was booked in the name of {key}?",
        "Which {nouns} were booked in the names of {key}?",
        "In the name of {key} we booked {noun}",
        "We booked the {nouns}",
    ),
    Wording(
        "special number",
        "special numbers",
        "A few {nouns} are scattered over the text that follows. You will be examined on them.",
        "Keep in mind that {key} stands for the {noun} {value}.",
        "For which {noun} does {key} stand?",
        "For which {nouns} do {key} stand?",
        "{key} stands for",
        "They stand for",
    ),
    Wording(
        "version",
        "versions",
        "Release notes, essays and remarks follow.",
        "Install {key} in {noun} {value}.",
        "In which {noun} should {key} be installed?",
        "In which {nouns} should {key} be installed?",
    ),
    Wording(
        "room",
        "rooms",
        "Please read this text to the end. It says which {noun} belongs to whom.",
        "{value} is the {noun} that belongs to {key}.",
        "Which {noun} belongs to {key}?",
        "Which {nouns} belong to {key}?",
        "To {key} belongs {noun}",
        "The {nouns} that belong to them are",
    ),
    Wording(
        "checksum",
        "checksums",
        "Data for retrieval:",
        "checksum({key}) = {value}",
        "checksum({key}) =",
        "Write down the {nouns} of {key}.",
    ),
    Wording(
        "clue",
        "clues",
        "A treasure hunt has left {nouns} in this otherwise harmless text.",
        "If you look for {key}, the {noun} to follow is {value}.",
        "I look for {key}. Which {noun} do I follow?",
        "I look for {key}. Which {nouns} do I follow?",
        "The {noun} to follow is",
        "The {nouns} to follow are",
    ),
    Wording(
        "account",
        "accounts",
        "Statement of facts. Pay attention to the {nouns}.",
        "The {noun} held by {key} has the number {value}.",
        "Which number has the {noun} held by {key}?",
        "Which numbers have the {nouns} held by {key}?",
        "The {noun} held by {key} has the number",
        "The {nouns} held by {key} have the numbers",
    ),
    Wording(
        "magic number",
        "magic numbers",
        "Please go through the following material; I will question you about its {nouns} when you are done.",
        "Someone whispered that the {noun} of {key} would be {value}.",
        "What did someone whisper about the {noun} of {key}?",
        "What did someone whisper about the {nouns} of {key}?",
        "Someone whispered",
        "Someone whispered",
    ),
)
_MORE_NOISE = (
    "Trees have leaves. Birds have wings. Fish can swim. This is all. Let us go on.",
    "One day follows another. The tide comes in. The tide goes out. Nothing is new.",
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt ut labore.",
    "Page left blank on purpose. Please turn over. There is nothing here.",
)
NOISE = (*filler_text.NOISE_PARAGRAPHS, *_MORE_NOISE)


def draw_value(rng: random.Random) -> Callable[[], str]:
    """A kind of value: seven digits as in RULER most often, other numbers, UUIDs, words."""
    digits = rng.choice((4, 5, 6, 7, 7, 7, 8, 10))
    return rng.choices(
        (
            lambda: str(rng.randint(1_000_000, 9_999_999)),
            lambda: str(rng.randint(10 ** (digits - 1), 10**digits - 1)),
            lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
            lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}",
        ),
        (0.45, 0.15, 0.3, 0.1),
    )[0]


def draw_key(rng: random.Random) -> Callable[[], str]:
    """A kind of key: two words joined as RULER's keys are most often, names, UUIDs, numbers."""
    return rng.choices(
        (
            lambda: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}",
            lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}",
            lambda: f"{rng.choice(NAMES)} of the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}",
            lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
            lambda: str(rng.randint(10_000, 9_999_999)),
        ),
        (0.4, 0.15, 0.1, 0.25, 0.1),
    )[0]


def distinct(draw: Callable[[], str], count: int) -> list[str]:
    """``count`` different draws."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw()] = None
    return list(drawn)


def joined(names: list[str]) -> str:
    """Names as a sentence lists them."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def draw_haystack(rng: random.Random, prose: Prose) -> Callable[[int], tuple[list[str], str]]:
    """Noise, real text or made-up sentences: a function that makes so many words of them and tells what joins them."""
    kind = rng.choices(("prose", "noise", "essay"), (0.6, 0.25, 0.15))[0]
    paragraph = rng.choice(NOISE)
    if kind == "prose":
        return lambda words: (prose(rng, words), " ")
    if kind == "essay":
        return lambda words: (filler_text.essay(rng, words), " ")
    return lambda words: ([paragraph] * max(1, round(words / (paragraph.count(" ") + 1))), "\n")


def scattered(rng: random.Random, parts: list[str], inserts: list[str]) -> list[str]:
    """``parts`` with ``inserts`` at random places, in their order."""
    places = sorted((rng.randint(0, len(parts)) for _ in inserts), reverse=True)
    whole = list(parts)
    for place, insert in zip(places, reversed(inserts), strict=True):
        whole.insert(place, insert)
    return whole


def make(
    rng: random.Random, size: int, questions: int, prose: Prose, wordings: tuple[Wording, ...] = WORDINGS
) -> Conversation:
    """Build a conversation of about ``size`` words of context with up to ``questions`` questions, no key asked twice.

    Args:
        rng: the only source of randomness.
        size: words of the context.
        questions: questions at most.
        prose: real text.
        wordings: what to choose the wording from.
    """
    wording = rng.choice(wordings)
    value, key, haystack = draw_value(rng), draw_key(rng), draw_haystack(rng, prose)
    needle_words = wording.needle.count(" ") + 2
    only_needles = rng.random() < 0.3
    values_per_key = 1 if only_needles else rng.choice((1, 1, 1, 2, 3, 4, 4))
    wanted_keys = rng.choice((1, 4) if questions == 1 else (4, 16, 32, 64))
    per_question = rng.choice((1, 1, 1, 1, 2, 3, 4))
    most = max(1, size // (3 * needle_words * values_per_key))
    key_count = size // needle_words if only_needles else min(most, wanted_keys)
    key_count = max(1, key_count)
    keys = distinct(key, key_count)
    drawn = iter(distinct(value, key_count * values_per_key))
    needles = [(name, next(drawn)) for name in keys for _ in range(values_per_key)]
    rng.shuffle(needles)
    owned: dict[str, list[str]] = {name: [] for name in keys}
    for name, drawn_value in needles:
        owned[name].append(drawn_value)

    def filled(template: str, **fields: str) -> str:
        return template.format(noun=wording.noun, nouns=wording.nouns, **fields)

    sentences = [filled(wording.needle, key=name, value=drawn_value) for name, drawn_value in needles]
    if only_needles:
        body = "\n".join(sentences)
    else:
        parts, separator = haystack(max(1, size - needle_words * len(needles)))
        body = separator.join(scattered(rng, parts, sentences))

    turns = []
    order = rng.sample(keys, key_count)
    per_question = min(key_count, per_question)
    for first in range(0, key_count - per_question + 1, per_question)[:questions]:
        names = order[first : first + per_question]
        answers = [answer for name in names for answer in owned[name]]
        one = len(answers) == 1
        asked = filled(wording.question if one else wording.several, key=joined(names))
        given = filled(wording.given if one else wording.given_several, key=joined(names))
        turns.append(Turn(asked, given, f" {', '.join(answers)}."))
    shape = "needles" if only_needles else f"{min(key_count, 4)}k{values_per_key}v{per_question}q"
    return Conversation(f"niah_{shape}", filled(wording.before) + "\n\n" + body + "\n\n", turns)
