"""The plots that the documentation shows can be read there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.folders import PLOTS
from tests.plots import assert_readable

SHOWN = sorted(PLOTS.glob("*.svg"))


def test_there_are_plots() -> None:
    assert len(SHOWN) >= 6


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
def test_a_plot_is_readable(path: Path) -> None:
    assert_readable(path)


@pytest.mark.parametrize(
    ("width", "size", "problem"),
    [(675, 9, None), (460, 9, None), (675, 8.9, "8.9 points"), (1350, 17.9, "8.9 points"), (1350, 18, None)],
)
def test_fonts_are_judged_at_the_width_that_is_shown(
    width: float, size: float, problem: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "plot.svg"
    text = f'<text style="font: {size}px sans-serif"/>' * 2
    path.write_text(f'<svg width="{width}pt" height="{width / 2}pt">{text}</svg>')
    if problem is None:
        assert_readable(path)
    else:
        with pytest.raises(AssertionError, match=problem):
            assert_readable(path)


def test_a_strip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    path.write_text('<svg width="600pt" height="150pt">' + '<text style="font-size: 10px"/>' * 2 + "</svg>")
    with pytest.raises(AssertionError, match=r"4\.0 times as wide as high"):
        assert_readable(path)
