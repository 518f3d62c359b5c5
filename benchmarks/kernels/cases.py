"""What kernels are timed on, and how far from a reference their results may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor

LARGEST_ERROR: Final = 1e-2
"""Relative, in bfloat16."""
KERNEL: Final = "kernel "
"""Before a kernel's name, where rows tell stages: a stage of its own."""


@dataclass(frozen=True)
class Case:
    """A batch of ``batch`` contexts of nominally ``context`` tokens each."""

    context: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.context * self.batch


def parse_cases(text: str) -> list[Case]:
    """Read cases such as ``32768x8`` with commas between them."""
    return [Case(*map(int, case.split("x"))) for case in text.split(",")]


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Return ‖output − expected‖ ÷ ‖expected‖."""
    return float((output.double() - expected.double()).norm() / expected.double().norm())


def wrong_errors(errors: Mapping[str, float]) -> dict[str, float]:
    """Return the errors that are too large, or no numbers."""
    return {what: error for what, error in errors.items() if not error <= LARGEST_ERROR}
