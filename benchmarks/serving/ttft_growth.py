"""How the time to first token grows with the prompt, out of records of ``serving.serve``: series, and their exponents.

An exponent is the slope of a line through the logarithms of length and time, by least squares over the longest half of
the lengths: of shorter prompts, other things than attention are most of the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import linear_regression
from typing import Final

from benchmarks.records import Record, Row

MIN_LENGTHS: Final = 4
"""Lengths of a series."""
_BENCH: Final = "serve"


@dataclass(frozen=True)
class Power:
    """``scale`` × tokens ** ``exponent``, fitted.

    Attributes:
        scale: seconds.
        exponent: of the number of tokens.
        first: the shortest prompt that it was fitted to, tokens.
        last: the longest.
    """

    scale: float
    exponent: float
    first: int
    last: int

    def __call__(self, tokens: int) -> float:
        """Return seconds."""
        return float(self.scale * tokens**self.exponent)


@dataclass(frozen=True)
class Growth:
    """The times to first token of one policy on one server.

    Attributes:
        model: whose shape.
        run: which header of the record is theirs.
        name: of the policy, with the backend where it is dense.
        seconds: by tokens of the prompt, ascending.
    """

    model: str
    run: int
    name: str
    seconds: Mapping[int, float]

    @property
    def fit(self) -> Power:
        """Of the longest half of the lengths, the middle one included."""
        return fitted_power(dict(list(self.seconds.items())[len(self.seconds) // 2 :]))


def fitted_power(seconds: Mapping[int, float]) -> Power:
    """Fit a power law to seconds by tokens, by least squares of their logarithms.

    Raises:
        ValueError: there are fewer than two points, or one that is not positive.
    """
    lengths = [math.log(tokens) for tokens in seconds]
    slope, intercept = linear_regression(lengths, [math.log(time) for time in seconds.values()])
    return Power(math.exp(intercept), slope, min(seconds), max(seconds))


def growths_of(record: Record) -> list[Growth]:
    """Return the series of a record, in the order of its rows.

    Raises:
        ValueError: two rows would be the same point.
    """
    points: dict[tuple[str, int, str], dict[int, float]] = {}
    for row in record.rows:
        if row.bench != _BENCH or row.parameters["figure"] != "ttft" or row.batch != 1:
            continue
        series = points.setdefault((row.model, row.parameters.get("run", 0), name_of(row)), {})
        if row.context in series:
            raise ValueError(f"{name_of(row)} was measured twice at {row.context} tokens in one run")
        series[row.context] = row.measured / 1e3
    return [Growth(*key, dict(sorted(found.items()))) for key, found in points.items() if len(found) >= MIN_LENGTHS]


def name_of(row: Row) -> str:
    """Return what a series is called."""
    return f"{row.policy}, {row.parameters['backend']}" if row.policy == "dense" else row.policy
