"""The plot of how the time to first token grows with the prompt, out of a record of ``serving.serve``.

    python -m benchmarks.serving.ttft_plot kernels/benchmarks/results/ttft.json

Every model with times at enough lengths gives one SVG; dashed are the power laws of ``ttft_growth``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import matplotlib as mpl
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.folders import PLOTS
from benchmarks.markdown_tables import in_thousands
from benchmarks.records import Record, headers_of
from benchmarks.serving.ttft_growth import FEWEST, Growth, growths_of

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
        raise ValueError(f"no run of the record has times to first token at {FEWEST} lengths")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for model, growths in by_model.items():
        runs = {growth.run for growth in growths}
        if len(runs) > 1:
            raise ValueError(f"{len(runs)} runs of {model} have times to first token at {FEWEST} lengths")
        device = headers_of(record)[growths[0].run]["device"]
        path = folder / f"gpu-ttft-{model.lower()}.svg"
        # The same figures, the same file: no date, no random names; and text stays text.
        with mpl.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none"}):
            _figure(growths, f"Time to first token: {model} on {device}").savefig(path, metadata={"Date": None})
        paths.append(path)
    return paths


def _figure(growths: Sequence[Growth], title: str) -> Figure:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes: Axes = figure.add_subplot()
    for number, growth in enumerate(growths):
        lengths, seconds, fit = list(growth.seconds), list(growth.seconds.values()), growth.fit
        label = f"{growth.name} ({fit.exponent:.2f})"
        marker = _MARKERS[number % len(_MARKERS)]
        [line] = axes.plot(lengths, seconds, marker, markersize=4, label=label)
        ends = [fit.first, fit.last]
        axes.plot(ends, [fit(tokens) for tokens in ends], "--", linewidth=1, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({tokens for growth in growths for tokens in growth.seconds})
    axes.set_xticks(ticks, [in_thousands(tokens) for tokens in ticks], fontsize=8)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("seconds")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="policy (exponent over the longest half)", fontsize=8, title_fontsize=8, frameon=False)
    return figure


if __name__ == "__main__":
    typer.run(main)
