"""How far an evaluation is: a bar on a terminal, a line for each cell elsewhere."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from winnow_evaluation.over_http.report import CellRow, SampleRecord
from winnow_evaluation.over_http.runner import Plan


class ConsoleProgress:
    """Reports to a console; a context manager."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self._console = console
        self._samples = plan.samples
        self._errors = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("[red]{task.fields[errors]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        total = len(plan.tasks) * len(plan.lengths) * len(plan.policies) * plan.samples
        self._task = self._bar.add_task("connecting", total=total, errors="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def sizing(self, task: str, length: int) -> None:
        self._bar.update(self._task, description=f"{task} at {length}: measuring lengths")

    def asking(self, task: str, length: int) -> None:
        self._bar.update(self._task, description=f"{task} at {length}")

    def answered(self, record: SampleRecord) -> None:
        self._errors += record.error is not None
        self._bar.update(self._task, advance=1, errors=f"{self._errors} errors" if self._errors else "")

    def finished(self, row: CellRow) -> None:
        if row.status == "does not fit":
            self._bar.update(self._task, advance=self._samples)
        if not self._console.is_terminal:
            result = row.status if row.accuracy is None else f"accuracy {row.accuracy:.1f} %, {row.errors} errors"
            asked = f", {row.policy}" if row.policy is not None else ""
            self._console.print(f"{row.task} at {row.length}{asked}: {result}", highlight=False, markup=False)
