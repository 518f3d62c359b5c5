"""What kernels are timed on, and how far from a reference their results may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import typer
from torch import Tensor

KV_CACHE_DTYPES: Final = {"auto": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
"""By the names that SGLang has for them."""
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


def cache_dtype_named(name: str) -> torch.dtype:
    """Return the dtype of keys and values that ``--kv-cache-dtype`` asks for.

    Raises:
        typer.BadParameter: there is none of that name.
    """
    if name not in KV_CACHE_DTYPES:
        raise typer.BadParameter(f"{name} is none of {', '.join(KV_CACHE_DTYPES)}", param_hint="--kv-cache-dtype")
    return KV_CACHE_DTYPES[name]


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Return ‖output − expected‖ ÷ ‖expected‖."""
    return float((output.double() - expected.double()).norm() / expected.double().norm())


def wrong_errors(errors: Mapping[str, float]) -> dict[str, float]:
    """Return the errors that are too large, or no numbers."""
    return {what: error for what, error in errors.items() if not error <= LARGEST_ERROR}
