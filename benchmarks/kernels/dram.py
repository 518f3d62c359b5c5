"""Whether counted bytes are the bytes that are read: ``attend``'s own count beside what DRAM delivered.

    python -m benchmarks.kernels.dram run --output benchmarks/results/dram.json

Needs Nsight Compute's ``ncu``, and leave to read the GPU's counters. Each case is one launch in a process of its own,
with flushed caches. Counted are K and V, as requests are told; the kernel reads four bytes more for each token that is
selected for a KV head, which is its slot.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.console import Console

from benchmarks.folders import REPOSITORY, RESULTS
from benchmarks.kernels.attend import DTYPE, HEAD_DIM, MODEL, Contestant, Inputs
from benchmarks.kernels.cases import Case, parse_cases
from benchmarks.kernels.timing import gpu
from benchmarks.records import Record, Row, header_from_outside
from winnow_kernels.attend.gpu import Launch
from winnow_kernels.batch import Count

BENCH: Final = "dram"
METRIC: Final = "dram__bytes_read.sum"
KERNEL: Final = "attend_kernel"
_OF_NCU: Final = "=="

app = typer.Typer(add_completion=False)
console = Console(width=120)


@dataclass(frozen=True)
class Selected:
    """What is attended to: ``share`` percent of each context, in ``unit``s; ``whole`` is all of it."""

    unit: str
    share: float


SELECTIONS: Final = (Selected("whole", 100), Selected("tokens", 5), Selected("tokens", 12), Selected("pages", 12))


@app.command()
def run(
    cases: Annotated[str, typer.Option(help="Tokens in context × batch.")] = "32768x8",
    output: Annotated[Path, typer.Option(help="Where to write JSON.")] = RESULTS / "dram.json",
) -> None:
    """Profile, print, write JSON."""
    about = header_from_outside()
    rows = []
    for case in parse_cases(cases):
        for selected in SELECTIONS:
            counted, delivered = profile(case, selected)
            rows.append(row_of(case, selected, counted, delivered))
            console.print(
                f"{case.context:,} × {case.batch}, {selected.unit} {selected.share:g} %: "
                f"{counted:,} bytes counted, {delivered:,} delivered, {delivered / counted:.3f} times as many"
            )
            Record(about, rows).write(output)


@app.command()
def read(
    context: Annotated[int, typer.Argument()],
    batch: Annotated[int, typer.Argument()],
    unit: Annotated[str, typer.Argument()],
    share: Annotated[float, typer.Argument()],
    output: Annotated[Path, typer.Argument(help="Where to write how many bytes were counted.")],
) -> None:
    """Attend once to random selections, the only launch that a profiler is told of."""
    torch.manual_seed(0)
    inputs = Inputs(Case(context, batch), 1, gpu())
    attend = Contestant(inputs, Launch.of(HEAD_DIM, DTYPE.itemsize)).call(0, inputs.select(unit, share), None)
    # Compiles.
    attend()
    inputs.batch.counts.zero_()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    attend()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    output.write_text(json.dumps(int(inputs.batch.counts[:, Count.READ_BYTES].sum())))


def profile(case: Case, selected: Selected) -> tuple[int, int]:
    """Return the bytes that are counted, and those that DRAM delivers.

    Raises:
        RuntimeError: the profiler failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        counted, report = Path(folder, "counted"), Path(folder, "report")
        # fmt: off
        command = [
            "ncu", "--profile-from-start", "off", "--clock-control", "none", "--kernel-name", KERNEL,
            "--metrics", METRIC, "--print-units", "base", "--csv", "--log-file", str(report),
            sys.executable, "-m", "benchmarks.kernels.dram", "read",
            str(case.context), str(case.batch), selected.unit, str(selected.share), str(counted),
        ]
        # fmt: on
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        told = report.read_text() if report.exists() else ""
        if done.returncode:
            raise RuntimeError(f"ncu ended with {done.returncode}: {told[-2000:]}{done.stdout[-2000:]}{done.stderr}")
        return json.loads(counted.read_text()), delivered_bytes(told.splitlines())


def delivered_bytes(report: Sequence[str]) -> int:
    """Return the bytes of all launches in a report of ``ncu --csv``, in base units.

    Raises:
        RuntimeError: there are none.
    """
    lines = csv.DictReader(line for line in report if line and not line.startswith(_OF_NCU))
    values = [int(line["Metric Value"].replace(",", "")) for line in lines if line["Metric Name"] == METRIC]
    if not values:
        raise RuntimeError(f"ncu has seen no launch of {KERNEL}: {report[-20:]}")
    return sum(values)


def row_of(case: Case, selected: Selected, counted: int, delivered: int) -> Row:
    """Return a row; ``measured`` is what DRAM delivered."""
    return Row(
        bench=BENCH,
        model=MODEL,
        policy=selected.unit,
        parameters={"share": selected.share, "counted_bytes": counted, "delivered_to_counted": delivered / counted},
        context=case.context,
        batch=case.batch,
        dense=None,
        measured=delivered,
        unit="bytes",
        speedup=None,
        floor_ratio=None,
    )


if __name__ == "__main__":
    app()
