"""From single measurements of servers to figures: medians, ratios, bounds, crossovers, tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.serving.server_plugins import NOOP
from winnow_evaluation.writing import markdown_table

DENSE: Final = "dense"
NATIVE: Final = "torch_native"
BASELINES: Final = (DENSE, NATIVE)
CONTROLS: Final = (*BASELINES, NOOP)


class Kind(StrEnum):
    """What was measured."""

    TTFT = "ttft"
    """Seconds to the first token of a prompt that is not cached."""
    DECODE = "decode"
    """Seconds of a decode step, as the server ships."""
    CROSSOVER = "crossover"
    """Seconds of a decode step on a server whose policies never run dense for the context's length."""


@dataclass(frozen=True)
class Series:
    """One contestant's measurements at one length of the prompt, one for each round.

    Attributes:
        tokens: in the prompt.
        seconds: one for each round; rounds of a kind and length are the same for all contestants.
        attended_ratio: of the context's tokens, those attended to in decode.
        first_step: seconds of the first decode step where the index was there already.
        index_build: seconds by which the very first such step took longer than another: what it built.
    """

    kind: Kind
    tokens: int
    contestant: str
    seconds: Sequence[float]
    attended_ratio: float | None = None
    first_step: float | None = None
    index_build: float | None = None


@dataclass(frozen=True)
class Figure:
    """A line of a table.

    Attributes:
        seconds: the median.
        baseline: the faster of the dense contestants; for one of these, the other.
        times_as_fast: as the baseline.
        bound: how many times as fast as the baseline attention that costs nothing is; None where not measured.
        slower_than_dense: 0.03 is three percent slower than Winnow's dense attention.
    """

    series: Series
    seconds: float
    baseline: str
    times_as_fast: float
    bound: float | None
    slower_than_dense: float

    @property
    def part_of_bound(self) -> float | None:
        return None if self.bound is None else self.times_as_fast / self.bound


def ratio(of: Series, to: Series) -> float:
    """Return the median over rounds of how many times as long ``of`` takes as ``to``."""
    return median(a / b for a, b in zip(of.seconds, to.seconds, strict=True))


def figures(all_series: Sequence[Series]) -> list[Figure]:
    """Compare contestants of a kind and length with each other."""
    found = []
    for cell in _cells(all_series):
        present = [cell[name] for name in BASELINES if name in cell]
        faster = min(present, key=lambda series: median(series.seconds))
        for name, series in cell.items():
            others = [other for other in present if other.contestant != name]
            baseline = (others or present)[0] if name in BASELINES else faster
            bound = ratio(baseline, cell[NOOP]) if NOOP in cell else None
            slower = ratio(series, cell[DENSE]) - 1
            found.append(
                Figure(series, median(series.seconds), baseline.contestant, ratio(baseline, series), bound, slower)
            )
    return found


def slower_policies(found: Iterable[Figure], tolerance: float) -> list[Figure]:
    """Return where, as the server ships, a policy decodes slower than dense by more than ``tolerance``."""
    return [
        figure
        for figure in found
        if figure.series.kind == Kind.DECODE
        and figure.series.contestant not in CONTROLS
        and figure.slower_than_dense > tolerance
    ]


def suggested_crossovers(found: Iterable[Figure], tolerance: float) -> dict[str, int | None]:
    """Return for each policy the shortest measured length from which on it is no slower than dense.

    Args:
        found: figures.
        tolerance: how much slower counts as no slower.

    Returns:
        Tokens; None for a policy that is slower at the longest length.
    """
    slow: dict[str, dict[int, bool]] = {}
    for figure in found:
        series = figure.series
        if series.kind == Kind.CROSSOVER and series.contestant not in CONTROLS:
            slow.setdefault(series.contestant, {})[series.tokens] = figure.slower_than_dense > tolerance
    suggested: dict[str, int | None] = {}
    for policy, by_length in slow.items():
        suggested[policy] = None
        for length in sorted(by_length, reverse=True):
            if by_length[length]:
                break
            suggested[policy] = length
    return suggested


def headings(kind: Kind) -> tuple[str, ...]:
    """Return the heading of each column of a kind's table."""
    if kind == Kind.TTFT:
        return ("tokens", "contestant", "seconds", "times as fast as", "", "bound", "of bound")
    compared = ("tokens", "contestant", "ms a token", "times as fast as", "", "bound", "of bound")
    return (*compared, "slower than dense", "attended", "first step, ms", "index, ms")


def cells(figure: Figure) -> tuple[str, ...]:
    """Return the text of each column of a kind's table."""
    series = figure.series
    itself = series.contestant == figure.baseline
    compared = (
        "" if itself else figure.baseline,
        "" if itself else f"{figure.times_as_fast:.2f}",
        "" if figure.bound is None else f"{figure.bound:.2f}",
        "" if figure.part_of_bound is None or series.contestant == NOOP else f"{figure.part_of_bound:.0%}",
    )
    if series.kind == Kind.TTFT:
        return (f"{series.tokens:,}", series.contestant, f"{figure.seconds:.2f}", *compared)
    return (
        f"{series.tokens:,}",
        series.contestant,
        f"{figure.seconds * 1e3:.2f}",
        *compared,
        "" if series.contestant in CONTROLS else f"{figure.slower_than_dense:+.1%}",
        "" if series.attended_ratio is None else f"{series.attended_ratio:.1%}",
        "" if series.first_step is None else f"{series.first_step * 1e3:.0f}",
        "" if series.index_build is None else f"{series.index_build * 1e3:.0f}",
    )


TITLES: Final = {
    Kind.TTFT: "Time to the first token of a prompt that is not cached",
    Kind.DECODE: "Decoding",
    Kind.CROSSOVER: "Decoding without crossovers",
}


def read_series(record: dict[str, Any]) -> list[Series]:
    """Read the measurements in a benchmark's record."""
    return [Series(**(entry | {"kind": Kind(entry["kind"])})) for entry in record["series"]]


def cpu_server_table(path: Path) -> str:
    """Return the record of ``benchmarks.cpu.server`` as Markdown."""
    return markdown(json.loads(path.read_text()))


def machine_line(record: dict[str, Any]) -> str:
    """Return on what, with which versions and when a record was measured, and with which model."""
    commit = record["commit"]["id"][:12] if record["commit"] else "unknown"
    if record["commit"] and record["commit"]["modified"]:
        commit += " with changes"
    versions = record["versions"]
    device = record.get("device") or f"{record['cpu']}, {record['cpu_threads']} threads"
    machine = f"{device}, SGLang {versions['sglang']}, torch {versions['torch']}"
    return f"{machine}; commit {commit}, {record['date'][:10]}; {record['model']}."


def markdown(record: dict[str, Any]) -> str:
    """Return a benchmark's record as Markdown tables."""
    parts = [machine_line(record)]
    found = figures(read_series(record))
    for kind in Kind:
        rows = [cells(figure) for figure in found if figure.series.kind == kind]
        if rows:
            parts += [f"**{TITLES[kind]}**", markdown_table(headings(kind), rows).rstrip()]
    return "\n\n".join(parts)


def _cells(all_series: Sequence[Series]) -> list[dict[str, Series]]:
    by_cell: dict[tuple[Kind, int], dict[str, Series]] = {}
    for series in all_series:
        by_cell.setdefault((series.kind, series.tokens), {})[series.contestant] = series
    return [by_cell[key] for key in sorted(by_cell, key=lambda key: (list(Kind).index(key[0]), key[1]))]
