"""Needle-in-a-haystack tasks (RULER, section 3.1): values hidden under keys in a long text.

The eight named tasks have RULER's parameters; wording, keys and filler are this project's own.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from winnow_evaluation.tasks import filler_text
from winnow_evaluation.tasks.sample import Question, Sample, Task
from winnow_evaluation.tasks.words import ADJECTIVES, NOUNS, distinct, inserted

Haystack = Literal["noise", "essay", "needles"]
Kind = Literal["numbers", "words", "uuids"]

_NEEDLES = (
    "One of the secret {kind} for {key} is: {value}.",
    "The register gives {key} the {kind} {value}.",
    "Remember that the {kind} kept for {key} is {value}.",
    "For {key}, somebody wrote down the {kind} {value}.",
    "The {kind} that belongs to {key} reads {value}.",
)
_INTRODUCTIONS = (
    "Some secret {kind} are hidden in the text below. Read it with care: there will be questions about the {kind}.",
    "The following text hides secret {kind}. Keep them in mind, you will be asked for them.",
    "Read this text and remember all the secret {kind} that you find in it.",
    "Below is a long text. Here and there it mentions {kind}, and I shall want to know them.",
)
_QUESTIONS = (
    "What are all the secret {kind} for {keys} in the text above?",
    "Which {kind} does the text give for {keys}?",
    "Tell me the {kind} of {keys}.",
    "List every one of the {kind} that the text mentions for {keys}.",
)
_SINGULAR = {"numbers": "number", "words": "word", "uuids": "UUID"}
_PLURAL = {"numbers": "numbers", "words": "words", "uuids": "UUIDs"}


@dataclass(frozen=True)
class NeedleTask:
    """How many needles of what kind are hidden in what, and how many are asked for.

    Attributes:
        haystack: ``noise`` repeats a paragraph, ``essay`` is running text, ``needles`` is nothing but other needles.
        keys, values: what stands for a key and for a value.
        key_count: keys hidden on purpose (a haystack of needles holds more).
        values_per_key: values of each key.
        keys_per_question: keys that one question asks for.
    """

    haystack: Haystack
    keys: Kind
    values: Kind
    key_count: int = 1
    values_per_key: int = 1
    keys_per_question: int = 1


NEEDLE_TASKS = {
    "niah_single_1": NeedleTask("noise", "words", "numbers"),
    "niah_single_2": NeedleTask("essay", "words", "numbers"),
    "niah_single_3": NeedleTask("essay", "words", "uuids"),
    "niah_multikey_1": NeedleTask("essay", "words", "numbers", key_count=4),
    "niah_multikey_2": NeedleTask("needles", "words", "numbers"),
    "niah_multikey_3": NeedleTask("needles", "uuids", "uuids"),
    "niah_multivalue": NeedleTask("essay", "words", "numbers", values_per_key=4),
    "niah_multiquery": NeedleTask("essay", "words", "numbers", key_count=4, keys_per_question=4),
}
"""The parameters of RULER's ``synthetic.yaml``."""


def draw_distinct(rng: random.Random, kind: Kind, count: int, between: str = " ") -> list[str]:
    """Draw keys or values, no two alike; ``between`` joins the two words of one."""
    draw: Callable[[], str] = {
        "numbers": lambda: str(rng.randint(1_000_000, 9_999_999)),
        "words": lambda: f"{rng.choice(ADJECTIVES)}{between}{rng.choice(NOUNS)}",
        "uuids": lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
    }[kind]
    return distinct(draw, count)


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def make(rng: random.Random, size: int, task: NeedleTask, questions: int = 1) -> Sample:
    """Build a sample of about ``size`` words.

    Args:
        rng: the only source of randomness.
        size: words of the context.
        task: the parameters.
        questions: questions on this context, each of ``task.keys_per_question`` of its keys, no key twice;
            fewer if there are not keys enough.
    """
    needle = rng.choice(_NEEDLES)
    kind = (_PLURAL if "One of" in needle else _SINGULAR)[task.values]
    needle_words = needle.count(" ") + 1
    key_count = max(task.key_count, task.keys_per_question)
    if task.haystack == "needles":
        key_count = max(key_count, size // (needle_words * task.values_per_key))
    keys = draw_distinct(rng, task.keys, key_count)
    drawn = draw_distinct(rng, task.values, key_count * task.values_per_key)
    owners = [key for key in keys for _ in range(task.values_per_key)]
    needles = [
        (key, needle.format(kind=kind, key=key, value=value), value) for key, value in zip(owners, drawn, strict=True)
    ]
    rng.shuffle(needles)
    values: dict[str, list[str]] = {key: [] for key in keys}
    for key, _, value in needles:
        values[key].append(value)

    if task.haystack == "needles":
        parts = [sentence for _, sentence, _ in needles]
    else:
        filler = filler_text.essay if task.haystack == "essay" else filler_text.noise
        parts = filler(rng, size - needle_words * len(needles))
        places = sorted(rng.randint(0, len(parts)) for _ in needles)
        parts = inserted(parts, places, [sentence for _, sentence, _ in needles])
    separator = " " if task.haystack == "essay" else "\n"
    context = rng.choice(_INTRODUCTIONS).format(kind=_PLURAL[task.values]) + "\n\n" + separator.join(parts)

    wording = rng.choice(_QUESTIONS)
    asked = []
    order = rng.sample(keys, key_count)
    for first in range(0, key_count - task.keys_per_question + 1, task.keys_per_question)[:questions]:
        names = order[first : first + task.keys_per_question]
        answers = [value for name in names for value in values[name]]
        question_kind = _SINGULAR if len(answers) == 1 and "all" not in wording and "every" not in wording else _PLURAL
        asked.append(
            Question(
                text=wording.format(kind=question_kind[task.values], keys=_join(names)),
                answer=", ".join(answers),
                references=tuple(answers),
            )
        )
    return Sample(context, tuple(asked))


def _named(task: NeedleTask) -> Callable[[random.Random, int], Sample]:
    return lambda rng, size: make(rng, size, task)


def summary_of(task: NeedleTask, essay: str = "essay") -> str:
    """Return a task in a line; ``essay`` is what its running text is called."""
    haystack = {"noise": "noise", "essay": essay, "needles": "other needles"}[task.haystack]
    count = f"{task.key_count} keys" if task.key_count > 1 else "one key"
    each = f", {task.values_per_key} {task.values} each" if task.values_per_key > 1 else f", {task.values}"
    return f"{count} ({task.keys}){each}, in {haystack}; {task.keys_per_question} asked for"


TASKS = [
    Task(name, summary_of(task), _named(task), answer_tokens=lambda _size: 192) for name, task in NEEDLE_TASKS.items()
]
