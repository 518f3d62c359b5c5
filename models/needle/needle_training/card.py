"""Write the accuracy tables of the model card from the evaluations' JSON documents.

Usage: ``python -m needle_training.card models/needle``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from winnow_evaluation.tasks import TASKS

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def tables(folder: Path) -> str:
    """One table for each device among ``results/*.json``: task by length, accuracy with its interval."""
    reports = [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]
    devices = dict.fromkeys(report["header"]["device"] for report in reports)
    return "\n\n".join(_table(device, [r for r in reports if r["header"]["device"] == device]) for device in devices)


def _table(device: str, reports: list[dict[str, Any]]) -> str:
    cells = {(row["task"], row["length"]): row for report in reports for row in report["rows"]}
    lengths = sorted({length for _, length in cells})
    lines = [
        f"**{device}** ({'; '.join(dict.fromkeys(_origin(report) for report in reports))}):",
        "",
        f"| task | {' | '.join(f'{length:,}' for length in lengths)} |",
        f"| --- |{' ---: |' * len(lengths)}",
    ]
    measured = {task for task, _ in cells}
    for task in (name for name in TASKS if name in measured):
        accuracies = [_accuracy(cells.get((task, length))) for length in lengths]
        lines.append(f"| `{task}` | {' | '.join(accuracies)} |")
    return "\n".join(lines)


def _origin(report: dict[str, Any]) -> str:
    header = report["header"]
    versions, options = header["versions"], header["options"]
    return (
        f"{header['date'][:10]}, commit {header['commit']['id'][:7]}, SGLang {versions['sglang']}, "
        f"seed {header['seed']}, {options['samples']} samples, {options['concurrency']} at once"
    )


def _accuracy(row: dict[str, Any] | None) -> str:
    if row is None or row["accuracy"] is None:
        return "–"
    return f"{row['accuracy']:.1f} [{row['accuracy_low']:.0f}, {row['accuracy_high']:.0f}]"


def updated(card: str, text: str) -> str:
    """``card`` with ``text`` between its two marks.

    Raises:
        ValueError: the card has no marks.
    """
    before, begin, rest = card.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the card must hold {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    card = folder / "README.md"
    card.write_text(updated(card.read_text(), tables(folder)))
