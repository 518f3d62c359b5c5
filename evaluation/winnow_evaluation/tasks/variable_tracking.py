"""Variable tracking (RULER, section 3.2): follow a chain of assignments through noise."""

from __future__ import annotations

import random
import string
from itertools import pairwise
from operator import itemgetter

from winnow_evaluation.tasks import filler_text
from winnow_evaluation.tasks.sample import Question, Sample, Task
from winnow_evaluation.tasks.words import distinct, inserted

RULER_HOPS = 4

_STYLES = (
    ("VAR {name} = {value}", "VAR {name} = VAR {source}"),
    ("LET {name} = {value}", "LET {name} = {source}"),
    ("SET {name} TO {value}", "SET {name} TO {source}"),
    ("ASSIGN {name} := {value}", "ASSIGN {name} := {source}"),
)
_INTRODUCTIONS = (
    "The text below hides assignments of variables. Follow the chains of assignments from value to variable.",
    "Track the variables in this text: some get a value, others get what an earlier variable holds.",
    "Read the text and keep track of which variable holds what.",
)
_QUESTIONS = (
    "Find all variables that hold the value {value} in the text above.",
    "Which variables are assigned the value {value}, directly or through other variables?",
    "List every variable whose value is {value}.",
)


def make(rng: random.Random, size: int, chains: int = 1, hops: int = RULER_HOPS) -> Sample:
    """Build a sample of about ``size`` words with ``chains`` chains of ``hops`` copies; each chain gets a question."""
    names = distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=5)), chains * (hops + 1))
    values = rng.sample(range(10_000, 100_000), chains)
    first, copy = rng.choice(_STYLES)
    groups = [names[i * (hops + 1) : (i + 1) * (hops + 1)] for i in range(chains)]

    parts = filler_text.noise(rng, size - 5 * len(names))
    inserts: list[tuple[int, str]] = []
    for group, value in zip(groups, values, strict=True):
        lines = [first.format(name=group[0], value=value)]
        lines += [copy.format(name=name, source=source) for source, name in pairwise(group)]
        places = sorted(rng.randint(0, len(parts)) for _ in lines)
        inserts += zip(places, lines, strict=True)
    # Lines that share a place stay in order.
    inserts.sort(key=itemgetter(0))
    parts = inserted(parts, [place for place, _ in inserts], [line for _, line in inserts])
    context = rng.choice(_INTRODUCTIONS) + "\n\n" + "\n".join(parts)
    wording = rng.choice(_QUESTIONS)
    questions = [
        Question(wording.format(value=value), "They are " + ", ".join(group), tuple(group))
        for group, value in zip(groups, values, strict=True)
    ]
    rng.shuffle(questions)
    return Sample(context, tuple(questions))


TASKS = [Task("vt", "one chain of five variables in noise; name them all", make, answer_tokens=lambda _size: 64)]
