"""Write the accuracy tables of the model card from the evaluations' JSON documents.

Usage: ``python -m needle_training.card models/needle``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from winnow_evaluation.model_card import accuracy_table, reports_of, write_card
from winnow_evaluation.tasks import TASKS


def tables(folder: Path) -> str:
    """One table for each device among ``results/*.json``: task by length, accuracy with its interval."""
    reports = reports_of(folder)
    devices = dict.fromkeys(report["header"]["device"] for report in reports)
    return "\n\n".join(_table(device, [r for r in reports if r["header"]["device"] == device]) for device in devices)


def _table(device: str, reports: list[dict[str, Any]]) -> str:
    origins = "; ".join(dict.fromkeys(_origin(report) for report in reports))
    rows = [row for report in reports for row in report["rows"]]
    return "\n".join([f"**{device}** ({origins}):", "", *accuracy_table(rows, TASKS)])


def _origin(report: dict[str, Any]) -> str:
    header = report["header"]
    versions, options = header["versions"], header["options"]
    return (
        f"{header['date'][:10]}, commit {header['commit']['id'][:7]}, SGLang {versions['sglang']}, "
        f"seed {header['seed']}, {options['samples']} samples, {options['concurrency']} at once"
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_card(folder, tables(folder))
