"""The form of a GPU benchmark's record: a header that says what it ran on, and rows, one for each measurement."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.folders import REPOSITORY
from benchmarks.markdown_tables import commit_of, in_thousands
from winnow_evaluation.machine import surroundings
from winnow_evaluation.writing import write_json

_DISTRIBUTIONS: Final = ("triton", "flashinfer-python", "sglang", "sglang-kernel")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
        bench: which benchmark.
        model: whose shape.
        policy: what was measured.
        parameters: what else tells rows apart.
        context: tokens of each request.
        batch: requests.
        dense: the same of the fastest dense contestant; None where nothing dense was measured.
        unit: of ``dense`` and ``measured``.
        speedup: how many times as fast as dense.
        floor_ratio: time in which what must be read can be read ÷ time measured; 1 is as fast as memory allows.
        spread: of the measurement, (third quartile − first quartile) ÷ median; a smaller difference is noise.
    """

    bench: str
    model: str
    policy: str
    parameters: dict[str, Any]
    context: int
    batch: int
    dense: float | None
    measured: float
    unit: str
    speedup: float | None
    floor_ratio: float | None
    spread: float | None = None


@dataclass(frozen=True)
class Record:
    """What a benchmark leaves behind."""

    header: dict[str, Any]
    rows: Sequence[Row]

    def write(self, path: Path) -> None:
        """Write JSON to ``path``, whose folder is made if need be; what was there before is replaced at once."""
        write_json(path, {"header": self.header, "rows": [asdict(row) for row in self.rows]})

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read what ``write`` wrote.

        Raises:
            ValueError: it is something else.
        """
        content = json.loads(path.read_text())
        try:
            return cls(content["header"], [Row(**row) for row in content["rows"]])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is no record of a GPU benchmark: {error}") from error


def merged(records: Sequence[Record]) -> Record:
    """Return the rows of several runs in one record; the parameter ``run`` says which header is a row's."""
    headers: list[dict[str, Any]] = []
    rows = []
    for record in records:
        # A record that was merged before has its headers in a list.
        runs = record.header.get("runs", [record.header])
        for row in record.rows:
            run = len(headers) + row.parameters.get("run", 0)
            rows.append(Row(**asdict(row) | {"parameters": row.parameters | {"run": run}}))
        headers += runs
    return Record({"runs": headers}, rows)


def headers_of(record: Record) -> list[dict[str, Any]]:
    """Return the headers of all runs in a record, in the order that the rows' parameter ``run`` counts."""
    runs: list[dict[str, Any]] = record.header.get("runs", [record.header])
    return runs


def case_of(row: Row) -> str:
    """Return tokens of context and requests, as tables tell them."""
    return f"{in_thousands(row.context)} × {row.batch}"


def devices_of(record: Record) -> str:
    """Return the line below a table that tells what the record was measured on."""
    about = {f"{header['device']}, {commit_of(header['commit'])}" for header in headers_of(record)}
    return f"\n{'; '.join(sorted(about))}.\n"


def header_from_outside() -> dict[str, Any]:
    """Return the header from a process that ends: to look at a GPU takes memory that servers would miss."""
    command = [sys.executable, "-m", "benchmarks.records"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"there is no header: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def header() -> dict[str, Any]:
    """Return what a record begins with: date, commit, device, and versions."""
    described = surroundings(*_DISTRIBUTIONS)
    described["versions"]["cuda"] = torch.version.cuda
    if not torch.cuda.is_available():
        return described | {"device": described["cpu"]}
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return described | {
        "device": device.name,
        "multiprocessors": device.multi_processor_count,
        "l2_bytes": device.L2_cache_size,
        "memory_bytes": device.total_memory,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(header()))
