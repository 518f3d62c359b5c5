"""Plots for the documentation: SVG as wide as GitHub shows a page, with text that can be read at that width."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_PIXELS: Final = 900
SMALLEST_FONT: Final = 9
"""In points, when the plot is ``WIDTH_PIXELS`` wide."""
COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, to be told apart without colour vision."""
_PIXELS_PER_INCH: Final = 96
_FONTS: Final[dict[Any, Any]] = {
    "font.size": SMALLEST_FONT,
    "axes.labelsize": 10,
    "axes.titlesize": 10,
    "figure.titlesize": 11,
    "xtick.labelsize": SMALLEST_FONT,
    "ytick.labelsize": SMALLEST_FONT,
    "legend.fontsize": SMALLEST_FONT,
    "legend.title_fontsize": SMALLEST_FONT,
}


def save_plot(path: Path, height: float, draw: Callable[[Figure], None]) -> None:
    """Write to ``path`` as SVG what ``draw`` puts on an empty figure of ``height`` inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    path.write_text(svg(path.name, height, draw), encoding="utf-8")


def svg(name: str, height: float, draw: Callable[[Figure], None]) -> str:
    """Return as SVG what ``draw`` puts on an empty figure of ``height`` inches; plots of one page need other names.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError('a plot needs matplotlib: pip install "sglang-winnow[evaluation]"') from error
    # The same figures, the same file: no date, no random names; and text stays text.
    with mpl.rc_context(_FONTS | {"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure = Figure(figsize=(WIDTH_PIXELS / _PIXELS_PER_INCH, height), layout="constrained")
        draw(figure)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


def label_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Say what a plot of lines is of, over a grid that does not distract."""
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
