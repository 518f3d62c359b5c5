"""Plots of speed-ups over dense attention, out of the records of ``kernels.layer`` and ``serving.serve``.

    python -m benchmarks.speedup_plots kernels/benchmarks/results/attention.json kernels/benchmarks/results/serve.json

Every record gives one SVG for each model in it: a group of bars for each policy, a bar for each context and batch. A
policy that was measured in several ways is there once for each share of the context that it reads; with early
termination, by role of a layer, and on dense backends, not at all.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import matplotlib as mpl
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.folders import PLOTS
from benchmarks.markdown_tables import in_thousands
from benchmarks.records import Record, Row, headers_of

_TITLES: Final = {
    "attention": "A sparse attention layer, selection included",
    "serve": "Time per output token of a whole server",
}
# Light to dark, the smallest case first; to be told apart without colour vision, too.
_COLORS: Final = ("#bfd7ea", "#86b6d9", "#4a90c2", "#1f6597", "#0b3c5d", "#06243a")
_WIDTH: Final = 0.84
# In a line under a group of bars.
_LABEL_LETTERS: Final = 18

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
        _write(_figure(rows, f"{_TITLES[bench]}: {model} on {devices}"), path)
        paths.append(path)
    return paths


def is_shown(row: Row) -> bool:
    """Return whether a row has a bar."""
    told = row.parameters
    if row.speedup is None or row.bench not in _TITLES or told["backend"] != "winnow":
        return False
    if row.bench == "serve":
        return bool(told["figure"] == "tpot")
    return row.policy != "dense" and told["stage"] == "layer" and told["termination"] == "none" and "role" not in told


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


def _figure(rows: Sequence[Row], title: str) -> Figure:
    groups, cases, speedups = groups_of(rows)
    figure = Figure(figsize=(max(6.0, 0.5 + 0.32 * len(groups) * (len(cases) + 1)), 4.2), layout="constrained")
    axes: Axes = figure.add_subplot()
    width = _WIDTH / len(cases)
    for number, case in enumerate(cases):
        there = [(at, speedups[group, case]) for at, group in enumerate(groups) if (group, case) in speedups]
        bars = axes.bar(
            [at + (number - (len(cases) - 1) / 2) * width for at, _ in there],
            [speedup for _, speedup in there],
            width,
            label=f"{in_thousands(case[0])} × {case[1]}",
            color=_COLORS[number % len(_COLORS)],
        )
        axes.bar_label(bars, fmt="{:.1f}", fontsize=7, padding=1)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), [textwrap.fill(group, _LABEL_LETTERS) for group in groups])
    axes.set_ylabel("times as fast as the fastest dense backend")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="context × requests", fontsize=8, title_fontsize=8, frameon=False)
    return figure


def _write(figure: Figure, path: Path) -> None:
    # The same figures, the same file: no date, no random names; and text stays text.
    with mpl.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    typer.run(main)
