"""Scores of single answers, the mean of many, and the mean difference of two policies, with their intervals."""

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
class Mean:
    """A mean of scores in 0 to 1, or of their differences, and its 95 % interval; all as fractions."""

    mean: float
    low: float
    high: float


def mean_score(scores: Sequence[float]) -> Mean:
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
    return Mean(mean=mean, low=max(0.0, min(mean, centre - half)), high=min(1.0, max(mean, centre + half)))


PAIRED_INTERVAL = "95 % MOVER interval of the Wilson score intervals of mean gain and mean loss, paired by sample"


def paired_difference(scores: Sequence[float], base: Sequence[float]) -> Mean:
    """The mean of ``scores[i] - base[i]`` with its interval.

    A difference is a gain less a loss, of which at most one is not 0. Their means have Wilson score intervals, which
    are combined by the method of variance estimates recovery (MOVER: Zou and Donner, 2008) with the correlation that
    follows from their excluding each other. No randomness is involved. Where no sample differs, Wilson's bound on the
    share of those that do makes the interval: of 400 equal samples, 0 within 0.95 points. Like ``mean_score``'s it is
    made for scores of 0 or 1, and wider than it needs to be for scores between them.

    Raises:
        ValueError: there are no scores, not equally many, or one is outside 0 to 1.
    """
    if len(scores) != len(base):
        raise ValueError(f"scores: {len(scores)} cannot be paired with {len(base)}")
    if not all(0.0 <= score <= 1.0 for score in (*scores, *base)):
        raise ValueError("scores: each must be between 0 and 1")
    gain = mean_score([max(0.0, score - other) for score, other in zip(scores, base, strict=True)])
    loss = mean_score([max(0.0, other - score) for score, other in zip(scores, base, strict=True)])
    # Of two indicators that are never both 1, the covariance is -mean * mean.
    variances = gain.mean * (1 - gain.mean) * loss.mean * (1 - loss.mean)
    correlation = -gain.mean * loss.mean / math.sqrt(variances) if variances > 0 else 0.0
    mean = gain.mean - loss.mean
    below = _combined(gain.mean - gain.low, loss.high - loss.mean, correlation)
    above = _combined(gain.high - gain.mean, loss.mean - loss.low, correlation)
    return Mean(mean=mean, low=max(-1.0, mean - below), high=min(1.0, mean + above))


def _combined(gain: float, loss: float, correlation: float) -> float:
    return math.sqrt(gain**2 + loss**2 - 2 * correlation * gain * loss)
