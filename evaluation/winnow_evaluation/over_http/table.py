"""The accuracy table of the documentation, from the JSON documents that ``winnow eval --output`` writes.

Usage: ``python -m winnow_evaluation.over_http.table RESULTS.json... [--at-least 85] [--write FILE]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from winnow_evaluation.over_http.report import CellRow, Report
from winnow_evaluation.tasks import TASKS
from winnow_evaluation.writing import markdown_table, replaced_between

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
_MISSING = "–"
_NO_POLICY = "no policy"
# What rounds to 1.000: a prefill that attended to everything needs no line of its own.
_WHOLE = 0.9995


class TableError(ValueError):
    """Results that do not make one table."""


@dataclass(frozen=True)
class _Results:
    """The rows of all documents, each once.

    Attributes:
        labels: the policies in order of first appearance; every document's first is the first.
    """

    labels: tuple[str, ...]
    rows: Mapping[tuple[int, str, str], CellRow]

    @property
    def lengths(self) -> list[int]:
        return sorted({length for length, _, _ in self.rows})

    def tasks(self, length: int) -> list[str]:
        """The tasks at a length, those that ship in their own order and any others behind them."""
        order = list(TASKS)
        names = dict.fromkeys(task for of, task, _ in self.rows if of == length)
        return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def tables(reports: Mapping[str, Report], at_least: float) -> str:
    """One Markdown table for each length: tasks by policies, and below it the tasks that it leaves out.

    Args:
        reports: the documents by name.
        at_least: a task is shown at a length if the first policy's accuracy reaches so many percent.

    Raises:
        TableError: a document has no rows; or the documents differ in their model, their first policy or what a label
            stands for; or two of them have the same task, length and policy.
    """
    results = _joined(reports)
    parts = [_table(results, length, at_least, reports.values()) for length in results.lengths]
    return "\n\n".join([*parts, _legend(results)])


def updated(document: str, text: str) -> str:
    """``document`` with ``text`` between its two marks.

    Raises:
        TableError: the document does not have both marks once, in their order.
    """
    try:
        return replaced_between(document, BEGIN, END, text)
    except ValueError as error:
        raise TableError(str(error)) from error


def _joined(reports: Mapping[str, Report]) -> _Results:
    rows: dict[tuple[int, str, str], CellRow] = {}
    origin: dict[tuple[int, str, str], str] = {}
    meaning: dict[str, Any] = {}
    first: str | None = None
    for name, report in reports.items():
        if not report.rows:
            raise TableError(f"{name}: no rows")
        first = first or _label(report.rows[0])
        if _label(report.rows[0]) != first:
            raise TableError(f"{name}: the first policy is {_label(report.rows[0])!r} and must be {first!r}")
        for label, attention in (report.header.options.get("policies") or {}).items():
            if meaning.setdefault(label, attention) != attention:
                raise TableError(f"{name}: {label!r} is not the same policy as in the documents before")
        for row in report.rows:
            key = (row.length, row.task, _label(row))
            if key in rows:
                raise TableError(f"{name}: {row.task} at {row.length} with {key[2]!r} is in {origin[key]} too")
            rows[key], origin[key] = row, name
    models = {report.header.model for report in reports.values()}
    if len(models) > 1:
        raise TableError(f"the documents are of several models: {', '.join(sorted(models))}")
    return _Results(tuple(dict.fromkeys(label for _, _, label in rows)), rows)


def _table(results: _Results, length: int, at_least: float, reports: Iterable[Report]) -> str:
    origins = dict.fromkeys(_origin(report) for report in reports if any(row.length == length for row in report.rows))
    first = results.labels[0]
    shown, below, unfit = [], [], []
    for task in results.tasks(length):
        row = results.rows.get((length, task, first))
        if row is None or row.accuracy is None:
            unfit.append(f"`{task}`")
        elif row.accuracy < at_least:
            below.append(f"`{task}` ({row.accuracy:.1f})")
        else:
            shown.append(task)
    lines = [f"**{length:,} tokens** ({'; '.join(origins)}):", ""]
    if shown:
        rows = [
            (f"`{task}`", *(_cell(results.rows.get((length, task, label))) for label in results.labels))
            for task in shown
        ]
        lines += markdown_table(("task", *map(_escaped, results.labels)), rows, "---:").splitlines()
    if shown and (below or unfit):
        lines.append("")
    left_out = []
    if below:
        left_out.append(f"Left out, {_escaped(first)} below {at_least:g} %: {', '.join(below)}.")
    if unfit:
        left_out.append(f"Not measured, the task does not fit: {', '.join(unfit)}.")
    return "\n".join([*lines, *([" ".join(left_out)] if left_out else [])])


def _origin(report: Report) -> str:
    header = report.header
    commit = "no commit" if header.commit is None else f"commit {header.commit.id[:7]}"
    if header.commit is not None and header.commit.modified:
        commit += " with changes"
    server = [f"server {header.server_version}"] if header.server_version is not None else []
    parts = [
        header.device or "unknown device",
        header.model,
        header.date[:10],
        commit,
        f"{header.options['samples']} samples",
        f"seed {header.seed}",
        *(f"{name} {version}" for name, version in header.versions.items()),
        *server,
    ]
    return ", ".join(parts if header.complete else [*parts, "interrupted"])


def _legend(results: _Results) -> str:
    text = (
        "A cell: accuracy in percent [95 % Wilson score interval] / attended ratio / KV read ratio, both of decoding "
        f"({_MISSING} where the server told none). A line that begins with “prefill” gives the two ratios of a sparse "
        "prefill."
    )
    if len(results.labels) > 1:
        text += (
            f" A signed number is the difference in accuracy to {_escaped(results.labels[0])} on the same samples, in "
            "percentage points [95 % interval]."
        )
    return text


def _cell(row: CellRow | None) -> str:
    if row is None or row.accuracy is None:
        return _MISSING
    decode = f"{_ratio(row.decode_attended_ratio)} / {_ratio(row.decode_kv_read_ratio)}"
    lines = [f"{row.accuracy:.1f} [{row.accuracy_low:.1f}, {row.accuracy_high:.1f}] / {decode}"]
    if row.prefill_attended_ratio is not None and row.prefill_attended_ratio < _WHOLE:
        lines.append(f"prefill {_ratio(row.prefill_attended_ratio)} / {_ratio(row.prefill_kv_read_ratio)}")
    if row.difference is not None:
        lines.append(f"{row.difference:+.1f} [{row.difference_low:+.1f}, {row.difference_high:+.1f}]")
    if row.errors:
        lines.append(f"{row.errors} errors")
    return "<br>".join(lines)


def _label(row: CellRow) -> str:
    return row.policy or _NO_POLICY


def _ratio(number: float | None) -> str:
    return _MISSING if number is None else f"{number:.3f}"


def _escaped(label: str) -> str:
    return label.replace("|", "\\|")


def main(
    results: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Documents of winnow eval.")],
    at_least: Annotated[
        float, typer.Option(min=0, max=100, help="Show the tasks on which the first policy reaches so many percent.")
    ] = 85.0,
    write: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help=f"Put the tables into this file, between {BEGIN} and {END}."),
    ] = None,
) -> None:
    """Print the accuracy tables of the results in Markdown, or write them into a document."""
    reports = {}
    for path in results:
        try:
            reports[str(path)] = Report.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
            raise typer.BadParameter(
                f"{path} is no document of winnow eval: {problem}", param_hint="RESULTS"
            ) from error
    try:
        text = tables(reports, at_least)
    except TableError as error:
        raise typer.BadParameter(str(error), param_hint="RESULTS") from error
    if write is None:
        typer.echo(text)
        return
    try:
        write.write_text(updated(write.read_text(encoding="utf-8"), text), encoding="utf-8")
    except TableError as error:
        raise typer.BadParameter(f"{write}: {error}", param_hint="--write") from error


if __name__ == "__main__":
    typer.run(main)
