"""Which releases of SGLang the tests passed on: ``service/winnow_service/tested_releases.json``, and its table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

ROOT: Final = Path(__file__).parents[1]
RECORD: Final = ROOT / "service/winnow_service/tested_releases.json"
PAGE: Final = ROOT / "docs/running.md"
BEGIN, END = "<!-- table of tested releases -->\n", "<!-- end of tested releases -->\n"

KINDS: Final = {
    "start": "each policy, CPU",
    "cpu": "all, CPU",
    "interpreted": "kernels, interpreted",
    "cuda": "CUDA",
}
"""What was tested: that a server starts on a CPU and answers each policy; all that SGLang decides on, on a CPU; kernels
in Triton's interpreter; a GPU."""

Record = dict[str, dict[str, Any]]


def read() -> Record:
    """Return the kinds of tests that passed, by release; of each its date, its commit, torch, and how many tests."""
    record: Record = json.loads(RECORD.read_text())
    return record


def table(record: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the record as a table: when tests of each kind passed last."""
    rows = [["SGLang", "torch", *KINDS.values()], ["---"] * (2 + len(KINDS))]
    for release, of in record.items():
        torch = next(iter(of.values()))["torch"].partition("+")[0]
        rows.append([release, torch, *(of[kind]["date"] if kind in of else "" for kind in KINDS)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def note_tested(kind: str, tests: int, commit: str | None) -> None:
    """Note in the record and its table that ``tests`` tests of ``kind`` passed on the installed SGLang, today."""
    record = read()
    today = datetime.now(UTC).date().isoformat()
    entry = {"date": today, "commit": commit, "torch": version("torch"), "tests": tests}
    record.setdefault(version("sglang"), {})[kind] = entry
    in_order = sorted(record.items(), key=lambda item: Version(item[0]))
    record = {release: {name: of[name] for name in KINDS if name in of} for release, of in in_order}
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(record) + END + rest.partition(END)[2])
