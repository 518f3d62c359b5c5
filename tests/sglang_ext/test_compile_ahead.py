"""Kernels are compiled ahead, and launched again afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.runtime.jit import JITFunction

from sglang_winnow.device.compile_ahead import compiling_ahead


@triton.jit  # type: ignore[untyped-decorator]
def kernel(pointer: Any) -> None:
    """Do nothing."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """What is run from now on: the grid, and whether it is only compiled."""
    found: list[tuple[Any, bool]] = []

    def run(_kernel: Any, *_: Any, grid: Any, warmup: bool, **__: Any) -> None:
        found.append((grid, warmup))

    monkeypatch.setattr(JITFunction, "run", run)
    return found


def test_within_kernels_are_only_compiled(launches: list[tuple[Any, bool]]) -> None:
    kernel[(1,)](None)
    with compiling_ahead():
        kernel[(2,)](None)
    kernel[(3,)](None)
    assert launches == [((1,), False), ((2,), True), ((3,), False)]


def test_an_error_leaves_launches_as_they_were(launches: list[tuple[Any, bool]]) -> None:
    with pytest.raises(ZeroDivisionError), compiling_ahead():
        raise ZeroDivisionError
    kernel[(1,)](None)
    assert launches == [((1,), False)]
