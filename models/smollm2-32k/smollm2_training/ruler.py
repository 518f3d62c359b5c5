"""RULER's tasks in RULER's own words, as the evaluation makes them, with more questions where the text answers them."""

from __future__ import annotations

import random
import re
from dataclasses import replace

from smollm2_training.needles import Prose
from smollm2_training.turns import Conversation, Turn
from winnow_evaluation.tasks.niah import NEEDLE_TASKS, NeedleTask
from winnow_evaluation.tasks.ruler import NEEDLE, RULER_TASKS, make_niah
from winnow_evaluation.tasks.sample import Question

_MAX_NEEDLES = 32
_WORDS_PER_NEEDLE = 30


def make(rng: random.Random, name: str, size: int, questions: int, prose: Prose) -> Conversation:
    """Build RULER's task ``name`` with about ``size`` words and up to ``questions`` questions.

    One question leaves the task as it is. For several, an essay or noise hides more keys than RULER's does.
    """
    task = NEEDLE_TASKS.get(name)
    if task is None:
        sample = RULER_TASKS[name].make(rng, size, prose)
        return Conversation(name, sample.context + sample.separator, [_turn(sample.questions[0])])
    if questions > 1 and task.haystack != "needles" and task.keys_per_question == 1:
        room = min(_MAX_NEEDLES, size // _WORDS_PER_NEEDLE) // task.values_per_key
        task = replace(task, key_count=max(task.key_count, min(questions, room)))
    sample = make_niah(rng, size, prose, task)
    told = _told(sample.context, task)
    first = sample.questions[0]
    turns = [_turn(first)]
    if task.keys_per_question == 1:
        asked = next(key for key, values in told.items() if first.references[0] in values)
        turns = [_turn(first, told[asked])]
        others = [key for key in told if key != asked]
        for key in rng.sample(others, min(questions - 1, len(others))):
            other = replace(first, text=first.text.replace(asked, key), given=first.given.replace(asked, key))
            turns.append(_turn(other, told[key]))
    return Conversation(name, sample.context + sample.separator, turns)


def _turn(question: Question, values: list[str] | None = None) -> Turn:
    """The question as a turn; answered with ``values`` in the order of the text, which can be learned."""
    return Turn(question.text, question.given, f" {', '.join(values)}." if values else question.answer)


def _told(context: str, task: NeedleTask) -> dict[str, list[str]]:
    """What the needles in ``context`` tell: the values of each key."""
    pattern = re.escape(NEEDLE).replace(r"\{kind\}", task.values)
    pattern = pattern.replace(r"\{key\}", r"(\S+)").replace(r"\{value\}", r"(\S+)")
    told: dict[str, list[str]] = {}
    for key, value in re.findall(pattern, context):
        told.setdefault(key, []).append(value)
    return told
