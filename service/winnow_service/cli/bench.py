"""``winnow bench``: time attention on a GPU, and SGLang with it. The benchmarks lie in a checkout of the repository."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import typer

import winnow_service
from winnow_service.cli.terminal import PASSED_ON, module_command

_OWN_CHECKOUT = Path(winnow_service.__file__).resolve().parents[2]

app = typer.Typer(help="Time attention on a GPU, and SGLang with it.", no_args_is_help=True)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def attention(context: typer.Context) -> None:
    """Time a layer with each policy beside dense decode: run (the default), merge; each has its --help."""
    _start("kernels.layer", context.args)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Serve a model with random weights and time it with each policy: run (the default), merge; each has its --help."""
    _start("serving.serve", context.args)


@app.command(context_settings=PASSED_ON, add_help_option=False)
def plots(context: typer.Context) -> None:
    """Draw what attention and serve have recorded."""
    _start("speedup_plots", context.args, subcommands=False)


def checkout() -> Path:
    """Return the checkout of the repository: the working directory, or the one that this package is installed from.

    Raises:
        typer.BadParameter: neither is one.
    """
    for folder in (Path.cwd(), _OWN_CHECKOUT):
        if (folder / "benchmarks" / "kernels" / "layer.py").is_file():
            return folder
    raise typer.BadParameter("the benchmarks are not installed with the package: run this in a checkout of Winnow")


def _start(module: str, arguments: list[str], *, subcommands: bool = True) -> None:
    if subcommands and (not arguments or arguments[0].startswith("-")) and arguments != ["--help"]:
        arguments = ["run", *arguments]
    path = os.pathsep.join(filter(None, (str(checkout()), os.environ.get("PYTHONPATH"))))
    command = module_command(f"benchmarks.{module}", arguments)
    raise typer.Exit(subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode)
