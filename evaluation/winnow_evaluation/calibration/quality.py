"""What policies lose and read: the curves, by the engine of ``winnow fidelity``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, ClassVar, Final

from scipy.stats import t as student_t

from sglang_winnow.quality_profile import Curve, Point
from winnow_evaluation.calibration.candidates import fits
from winnow_evaluation.calibration.parts import Advance, Found, Part
from winnow_evaluation.fidelity.measure import FLOOR, Plan
from winnow_evaluation.fidelity.policies import Measured

_OUTSIDE: Final = 0.05
_FIGURES: Final = ("kl", "top1", "true_share", "kv_read_ratio")

Figures = Mapping[str, float | None]
"""Of one prompt under one policy: ``kl``, ``top1``, ``true_share``, ``kv_read_ratio``."""


@dataclass(frozen=True)
class QualityPart(Part):
    """Every policy on every prompt.

    Attributes:
        scored: last tokens of a prompt that tell of its prefill.
    """

    name: ClassVar[str] = "quality"
    scored: int

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"scored": self.scored}

    def measure(self, length: int, number: int, advance: Advance) -> dict[str, Figures]:
        """Return the figures of each policy that leaves something out of the prompt, and of dense attention."""
        subject = self.subject
        fitting = [each for each in subject.policies if fits(each.policy, length)]
        plan = Plan(fitting, [], 1, self.scored, 1, subject.memory)
        *_, rows = plan.measured(subject.model, [subject.prompts[length][number]], advance)
        by_name = {_name(row["phase"], row["policy"], row["parameters"]): row for row in rows}
        found = {
            each.policy.canonical(): by_name[_name(_phase(each), each.name, each.parameters())] for each in fitting
        }
        [floor] = [row for row in rows if (row["phase"], row["policy"]) == ("decode", FLOOR)]
        return {name: {figure: row[figure] for figure in _FIGURES} for name, row in {FLOOR: floor, **found}.items()}

    def curves(self, found: Found) -> tuple[Curve, ...]:
        """Return the curve of each policy."""
        curves = [(each.policy, tuple(self._points(found, each.policy.canonical()))) for each in self.subject.policies]
        return tuple(Curve(attention=policy, points=points) for policy, points in curves if points)

    def floor(self, found: Found) -> tuple[Point, ...]:
        """Return the points of dense attention beside itself."""
        return tuple(self._points(found, FLOOR))

    def _points(self, found: Found, name: str) -> Iterator[Point]:
        for length in self.subject.lengths:
            of_prompts = [found[length, number] for number in range(self.prompts)]
            if name in of_prompts[0]:
                yield _point(length, [figures[name] for figures in of_prompts])


def _point(length: int, figures: Sequence[Figures]) -> Point:
    def values(name: str) -> list[float]:
        return [value for each in figures if (value := each[name]) is not None]

    kl, top1, shares, reads = (values(name) for name in _FIGURES)
    return Point(
        length=length,
        prompts=len(figures),
        kl=fmean(kl),
        kl_high=fmean(kl) + uncertainty(kl),
        top1=fmean(top1),
        top1_low=max(0.0, fmean(top1) - uncertainty(top1)),
        true_share=min(1.0, fmean(shares)) if shares else None,
        kv_read_ratio=fmean(reads),
    )


def uncertainty(values: Sequence[float]) -> float:
    """Return how far the ends of the 95 % interval of a mean are from it, by Student's t; 0 of a single value.

    A bootstrap of the handful of prompts that a calibration has is too narrow: it draws from these alone.
    """
    if len(values) < 2:
        return 0.0
    quantile = float(student_t.ppf(1 - _OUTSIDE / 2, len(values) - 1))
    return quantile * stdev(values) / math.sqrt(len(values))


def _phase(measured: Measured) -> str:
    return "prefill" if measured.is_prefill else "decode"


def _name(phase: str, policy: str, parameters: Mapping[str, Any]) -> str:
    return json.dumps([phase, policy, parameters], sort_keys=True)
