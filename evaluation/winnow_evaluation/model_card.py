"""Model cards, whose tables are made of the evaluation's results."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from winnow_evaluation.writing import markdown_table, replaced_between

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def write_card(folder: Path, tables: str) -> None:
    """Put the tables into the card of the model in ``folder``."""
    card = folder / "README.md"
    card.write_text(updated(card.read_text(), tables))


def updated(card: str, tables: str) -> str:
    """Return ``card`` with ``tables`` between its two marks.

    Raises:
        ValueError: the card does not have both marks once, in their order.
    """
    return replaced_between(card, BEGIN, END, tables, "the card")


def reports_of(folder: Path) -> list[dict[str, Any]]:
    """Return the reports in ``results/*.json`` below ``folder``, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]


def accuracy_table(rows: Iterable[Mapping[str, Any]], tasks: Collection[str] | None = None) -> list[str]:
    """Return the lines of a table: tasks by lengths, in percent with intervals.

    Args:
        rows: of reports; of two for one task and length the last counts.
        tasks: the order of those that were measured; by default that of the rows.
    """
    cells = {(row["task"], row["length"]): row for row in rows}
    measured = dict.fromkeys(task for task, _ in cells)
    lengths = sorted({length for _, length in cells})
    written = [
        (f"`{task}`", *(_accuracy(cells.get((task, length))) for length in lengths))
        for task in tasks or measured
        if task in measured
    ]
    return markdown_table(("task", *(f"{length:,}" for length in lengths)), written, "---:").splitlines()


def _accuracy(row: Mapping[str, Any] | None) -> str:
    if row is None or row["accuracy"] is None:
        return "–"
    return f"{row['accuracy']:.1f} [{row['accuracy_low']:.0f}, {row['accuracy_high']:.0f}]"
