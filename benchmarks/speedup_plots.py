"""Plots of speed-ups over dense attention, out of the records of ``kernels.layer`` and ``serving.serve``.

    python -m benchmarks.speedup_plots benchmarks/results/attention.json benchmarks/results/serve.json

Every record gives one SVG for each model in it: a panel for each context and batch, a bar for each policy. A policy
that was measured in several ways is there once for each share of the context that it reads; with early termination, by
role of a layer, and on dense backends, not at all.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Annotated, Final

import typer
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.folders import PLOTS
from benchmarks.markdown_tables import in_thousands
from benchmarks.records import Record, Row, headers_of
from winnow_evaluation.plotting import COLORS, save_plot

_TITLES: Final = {
    "attention": "A sparse attention layer, selection included",
    "serve": "Time per output token of a whole server",
}
_FASTER, _SLOWER = COLORS[:2]
_PANELS_IN_LINE: Final = 5
_MIN_INCHES: Final = 3.2
_HEADINGS_INCHES: Final = 0.7
_PANEL_INCHES: Final = 0.5
_ROW_INCHES: Final = 0.32
# In a line of a policy's name.
_LABEL_LETTERS: Final = 22
# Factors on a log scale; the second leaves room for a bar's label.
_MARGIN, _LABEL_MARGIN = 1.1, 2.1
_TICKS: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)

Case = tuple[int, int]
"""Tokens of context, requests."""


def main(
    records: Annotated[list[Path], typer.Argument(help="What kernels.layer and serving.serve wrote.")],
    folder: Annotated[Path, typer.Option(help="Where the plots go.")] = PLOTS,
) -> None:
    """Draw the plots."""
    for path in records:
        for plot in draw(Record.read(path), folder):
            typer.echo(str(plot))


def draw(record: Record, folder: Path) -> list[Path]:
    """Write a plot for each benchmark and model of a record; return their paths.

    Raises:
        ValueError: the record has nothing to be drawn.
    """
    shown = [row for row in record.rows if is_shown(row)]
    if not shown:
        raise ValueError("no row of the record compares a sparse policy with dense attention")
    devices = ", ".join(sorted({str(header["device"]) for header in headers_of(record)}))
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for bench, model in sorted({(row.bench, row.model) for row in shown}):
        rows = [row for row in shown if (row.bench, row.model) == (bench, model)]
        path = folder / f"gpu-{bench}-{model.lower()}.svg"
        groups, cases, _ = groups_of(rows)
        height = _HEADINGS_INCHES + _lines_of_panels(cases) * (_PANEL_INCHES + _ROW_INCHES * len(groups))
        title = f"{_TITLES[bench]}: {model} on {devices}"
        save_plot(path, max(height, _MIN_INCHES), partial(_draw_speedups, title=title, rows=rows))
        paths.append(path)
    return paths


def is_shown(row: Row) -> bool:
    """Return whether a row has a bar."""
    parameters = row.parameters
    if row.speedup is None or row.bench not in _TITLES or parameters["backend"] != "winnow":
        return False
    if row.bench == "serve":
        return bool(parameters["figure"] == "tpot")
    return (
        row.policy != "dense"
        and parameters["stage"] == "layer"
        and parameters["termination"] == "none"
        and "role" not in parameters
    )


def label_of(row: Row) -> str:
    """Return what a group of bars is called."""
    percent = row.parameters.get("union_percent")
    return row.policy if percent is None else f"{row.policy}, {percent} %"


def groups_of(rows: Sequence[Row]) -> tuple[list[str], list[Case], dict[tuple[str, Case], float]]:
    """Return the groups in the order of the rows, the cases by size, and the speed-up of each that was measured.

    Raises:
        ValueError: two rows would be the same bar.
    """
    speedups: dict[tuple[str, Case], float] = {}
    for row in rows:
        key = label_of(row), (row.context, row.batch)
        if key in speedups:
            raise ValueError(f"{key[0]} was measured twice at {row.context} × {row.batch}")
        assert row.speedup is not None
        speedups[key] = row.speedup
    return list(dict.fromkeys(label_of(row) for row in rows)), sorted({case for _, case in speedups}), speedups


def _lines_of_panels(cases: Sequence[Case]) -> int:
    return ceil(len(cases) / _PANELS_IN_LINE)


def _draw_speedups(figure: Figure, title: str, rows: Sequence[Row]) -> None:
    groups, cases, speedups = groups_of(rows)
    panels = figure.subplots(
        _lines_of_panels(cases), min(len(cases), _PANELS_IN_LINE), sharex=True, sharey=True, squeeze=False
    ).flatten()
    for axes in panels[len(cases) :]:
        axes.set_visible(False)
    for axes, case in zip(panels, cases, strict=False):
        measured = [(at, speedups[group, case]) for at, group in enumerate(groups) if (group, case) in speedups]
        axes.barh(
            [at for at, _ in measured],
            [speedup - 1 for _, speedup in measured],
            left=1,
            color=[_FASTER if speedup >= 1 else _SLOWER for _, speedup in measured],
        )
        for at, speedup in measured:
            # To the right even of a bar that points to the left.
            end = (max(1, speedup), at)
            axes.annotate(f"{speedup:.1f}", end, (4, 0), textcoords="offset points", va="center")
        axes.set_title(f"{in_thousands(case[0])} × {case[1]}")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    first = panels[0]
    first.set_yticks(range(len(groups)), [textwrap.fill(group, _LABEL_LETTERS) for group in groups])
    first.invert_yaxis()
    first.set_xscale("log")
    low, high = min(1, *speedups.values()) / _MARGIN, max(speedups.values()) * _LABEL_MARGIN
    first.set_xlim(low, high)
    first.set_xticks([tick for tick in _TICKS if low <= tick <= high], minor=False)
    first.xaxis.set_major_formatter(FuncFormatter(lambda times, _: f"{times:g}"))
    first.xaxis.set_minor_locator(NullLocator())
    figure.suptitle(title, x=0.01, ha="left")
    figure.supxlabel("context × requests above each panel; times as fast as the fastest dense backend, on a log scale")


if __name__ == "__main__":
    typer.run(main)
