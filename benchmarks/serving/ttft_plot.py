"""The plot of how the time to first token grows with the prompt, out of a record of ``serving.serve``.

    python -m benchmarks.serving.ttft_plot benchmarks/results/ttft.json

Every model with times at enough lengths gives one SVG; dashed are the power laws of ``ttft_growth``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.folders import PLOTS
from benchmarks.markdown_tables import in_thousands
from benchmarks.records import Record, headers_of
from benchmarks.serving.ttft_growth import MIN_LENGTHS, Growth, growths_of
from winnow_evaluation.plotting import COLORS, label_axes, save_plot

_HEIGHT: Final = 5.0
_MARKERS: Final = "osD^vP*X"


def main(
    record: Annotated[Path, typer.Argument(help="What serving.serve wrote.")],
    folder: Annotated[Path, typer.Option(help="Where the plots go.")] = PLOTS,
) -> None:
    """Draw the plots."""
    for path in draw(Record.read(record), folder):
        typer.echo(str(path))


def draw(record: Record, folder: Path) -> list[Path]:
    """Write a plot for each model of a record; return their paths.

    Raises:
        ValueError: the record has nothing to be drawn, or several runs of a model.
    """
    by_model: dict[str, list[Growth]] = {}
    for growth in growths_of(record):
        by_model.setdefault(growth.model, []).append(growth)
    if not by_model:
        raise ValueError(f"no run of the record has times to first token at {MIN_LENGTHS} lengths")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for model, growths in by_model.items():
        runs = {growth.run for growth in growths}
        if len(runs) > 1:
            raise ValueError(f"{len(runs)} runs of {model} have times to first token at {MIN_LENGTHS} lengths")
        device = headers_of(record)[growths[0].run]["device"]
        path = folder / f"gpu-ttft-{model.lower()}.svg"
        title = f"Time to first token: {model} on {device}"
        save_plot(path, _HEIGHT, partial(_draw_growths, title=title, growths=growths))
        paths.append(path)
    return paths


def _draw_growths(figure: Figure, title: str, growths: Sequence[Growth]) -> None:
    axes: Axes = figure.add_subplot()
    for number, growth in enumerate(growths):
        lengths, seconds, fit = list(growth.seconds), list(growth.seconds.values()), growth.fit
        label = f"{growth.name} ({fit.exponent:.2f})"
        marker = _MARKERS[number % len(_MARKERS)]
        [line] = axes.plot(lengths, seconds, marker, color=COLORS[number % len(COLORS)], markersize=6, label=label)
        ends = [fit.first, fit.last]
        axes.plot(ends, [fit(tokens) for tokens in ends], "--", linewidth=1.4, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({tokens for growth in growths for tokens in growth.seconds})
    axes.set_xticks(ticks, [in_thousands(tokens) for tokens in ticks])
    # Powers of ten would have exponents too small to read.
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    label_axes(axes, title, "tokens of the prompt", "seconds")
    axes.legend(title="policy (exponent over the longest half)", frameon=False)


if __name__ == "__main__":
    typer.run(main)
