"""One record of several evaluations of policies: each task, and tasks pooled, without the samples' texts.

    python -m benchmarks.fidelity.accuracy_record 8k.json 16k.json 32k.json \
        --output benchmarks/results/accuracy.json

Reports are those of ``winnow eval``, with the same policies, or with ``--policy`` those that are the same in all. Tasks
on which the first policy, dense, reaches ``MIN_DENSE_ACCURACY`` percent at a length are pooled there: all of them, and
those that look for needles. What a pool says of differences is paired by sample, as in the report.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from winnow_evaluation.over_http.report import CellRow, Header, Report, SampleRecord, measured_row
from winnow_evaluation.writing import write_json

MIN_DENSE_ACCURACY: Final = 85.0
"""Percent that dense attention must reach on a task for policies to be compared by it."""
ALL: Final = "all tasks"
NEEDLES: Final = "needle tasks"
_NEEDLE_PREFIX: Final = "niah"


@dataclass(frozen=True)
class AccuracyRecord:
    """Several evaluations.

    Attributes:
        runs: their headers.
        rows: of each task, as reported.
        pools: of ``ALL`` and ``NEEDLES``, by length and policy.
    """

    runs: Sequence[Header]
    rows: Sequence[CellRow]
    pools: Sequence[CellRow]

    @classmethod
    def of(cls, reports: Sequence[Report], kept: Sequence[str] | None = None) -> AccuracyRecord:
        """Put reports together. Those that were stopped before their end count with what they have.

        Args:
            reports: of ``winnow eval``.
            kept: names of the policies to keep, dense first; None for all.

        Raises:
            ValueError: the policies to keep are not the same in all.
        """
        asked = [_policies(report, kept) for report in reports]
        if any(of_report != asked[0] for of_report in asked):
            raise ValueError("reports: they must be of the same policies")
        policies = list(asked[0])
        headers = [
            report.header.model_copy(update={"options": report.header.options | {"policies": asked[0]}})
            for report in reports
        ]
        samples = [sample for report in reports for sample in report.samples if sample.policy in policies]
        rows = _rows([row for report in reports for row in report.rows if row.policy in policies], samples, policies[0])
        return cls(headers, rows, list(_pools(rows, samples, policies)))

    def write(self, path: Path) -> None:
        """Write JSON."""
        content: dict[str, Any] = {"runs": [run.model_dump() for run in self.runs]}
        content |= {"rows": [_known(row) for row in self.rows], "pools": [_known(row) for row in self.pools]}
        write_json(path, content)

    @classmethod
    def read(cls, path: Path) -> AccuracyRecord:
        """Read what ``write`` wrote."""
        content = json.loads(path.read_text())
        rows, pools = ([CellRow(**row) for row in content[name]] for name in ("rows", "pools"))
        return cls([Header(**run) for run in content["runs"]], rows, pools)


def main(
    reports: Annotated[list[Path], typer.Argument(help="What winnow eval wrote.")],
    output: Annotated[Path, typer.Option(help="Where to write JSON.")],
    policy: Annotated[
        list[str] | None, typer.Option(help="Keep this policy, by its name; may be repeated, dense first.")
    ] = None,
) -> None:
    """Put reports into one record."""
    AccuracyRecord.of([Report.model_validate_json(path.read_text()) for path in reports], policy).write(output)


def _policies(report: Report, kept: Sequence[str] | None) -> dict[str, Any]:
    asked: dict[str, Any] = report.header.options["policies"]
    if kept is None:
        return asked
    if missing := [name for name in kept if name not in asked]:
        raise ValueError(f"reports: one has no policy called {', '.join(missing)}")
    return {name: asked[name] for name in kept}


def _known(row: CellRow) -> dict[str, Any]:
    return {name: value for name, value in row.model_dump().items() if value is not None}


def _rows(reported: Sequence[CellRow], samples: Sequence[SampleRecord], dense: str) -> list[CellRow]:
    """Return each cell once, in the order in which they come: of several reports' the prompts are put together."""
    cells: dict[tuple[str, int, str | None], list[CellRow]] = {}
    for row in reported:
        cells.setdefault((row.task, row.length, row.policy), []).append(row)

    def records(task: str, length: int, policy: str | None) -> list[SampleRecord]:
        return _in_order(s for s in samples if (s.task, s.length, s.policy) == (task, length, policy))

    return [
        rows[0]
        if len(rows) == 1
        else measured_row(
            task, length, records(task, length, policy), None if policy == dense else records(task, length, dense)
        )
        for (task, length, policy), rows in cells.items()
    ]


def _in_order(samples: Iterable[SampleRecord]) -> list[SampleRecord]:
    return sorted(samples, key=lambda sample: (sample.task, sample.seed, sample.index))


def _pools(rows: Iterable[CellRow], samples: Sequence[SampleRecord], policies: Sequence[str]) -> Iterator[CellRow]:
    dense = policies[0]
    usable = [r for r in rows if r.policy == dense and r.accuracy is not None and r.accuracy >= MIN_DENSE_ACCURACY]
    for length in sorted({row.length for row in usable}):
        tasks = {row.task for row in usable if row.length == length}
        for name, pooled in ((ALL, tasks), (NEEDLES, {task for task in tasks if task.startswith(_NEEDLE_PREFIX)})):
            by_policy = {
                policy: _in_order(s for s in samples if (s.length, s.policy) == (length, policy) and s.task in pooled)
                for policy in policies
            }
            for policy, records in by_policy.items():
                if records:
                    yield measured_row(name, length, records, None if policy == dense else by_policy[dense])


if __name__ == "__main__":
    typer.run(main)
