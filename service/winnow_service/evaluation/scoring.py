"""Scores of single answers, and the mean of many with its interval."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f]")
_NORMAL_QUANTILE_95 = 1.959964


def found_fraction(output: str, references: Sequence[str]) -> float:
    """The fraction of references that occur in the output, ignoring case (RULER's ``string_match_all``).

    Raises:
        ValueError: there are no references.
    """
    if not references:
        raise ValueError("references: at least one is needed to score an answer")
    text = _CONTROL_CHARACTERS.sub("\n", output).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


@dataclass(frozen=True)
class MeanScore:
    """A mean of scores in 0 to 1 and its 95 % interval, all as fractions."""

    mean: float
    low: float
    high: float


def mean_score(scores: Sequence[float]) -> MeanScore:
    """The mean with its Wilson score interval.

    The interval is made for scores of 0 or 1. Scores between them vary less around the same mean, so for them it is
    wider than it needs to be. Unlike the normal interval it has a width at means of 0 and 1.

    Raises:
        ValueError: there are no scores, or one is outside 0 to 1.
    """
    if not scores:
        raise ValueError("scores: at least one is needed for a mean")
    if not all(0.0 <= score <= 1.0 for score in scores):
        raise ValueError("scores: each must be between 0 and 1")
    count = len(scores)
    mean = math.fsum(scores) / count
    z2 = _NORMAL_QUANTILE_95**2
    centre = (mean + z2 / (2 * count)) / (1 + z2 / count)
    spread = mean * (1 - mean) / count + z2 / (4 * count**2)
    half = _NORMAL_QUANTILE_95 * math.sqrt(max(0.0, spread)) / (1 + z2 / count)
    return MeanScore(mean=mean, low=max(0.0, min(mean, centre - half)), high=min(1.0, max(mean, centre + half)))
