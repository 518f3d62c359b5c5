"""The wordings in which the tasks can be put, each a catalogue of tasks that worker processes can make."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path

from winnow_evaluation.tasks.ruler import RULER_TASKS, ruler_tasks
from winnow_evaluation.tasks.sample import Task
from winnow_evaluation.text import TextHaystack, load_text


class Wording(StrEnum):
    """Whose prompts are put: Winnow's own, which the needle model was trained on, or RULER's."""

    WINNOW = "winnow"
    RULER = "ruler"


def ruler_catalogue(folder: Path) -> Mapping[str, Task]:
    """RULER's tasks, their haystacks from the held-out prose in ``folder``, which is read when first needed."""

    def haystack(rng: random.Random, words: int) -> Sequence[str]:
        return _held_out_prose(folder)(rng, words)

    return ruler_tasks(haystack)


def reading_text(tasks: Collection[str]) -> list[str]:
    """Those of RULER's tasks that need collected text."""
    return [name for name in tasks if RULER_TASKS[name].reads_text]


@cache
def _held_out_prose(folder: Path) -> TextHaystack:
    return TextHaystack(load_text("test", "prose", folder))
