"""What several commands do on a terminal, and in processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Final, NoReturn

import typer
from rich.console import Console

# Of commands that pass their arguments on to another program.
PASSED_ON: Final = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}

HostOption = Annotated[str, typer.Option(help="Address that the service listens on.")]
PortOption = Annotated[int, typer.Option(min=1, max=65535, help="Port that the service listens on.")]


def fail(message: object, status: int = 1) -> NoReturn:
    """End the command with ``status``, and say why."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(status)


def console_of_width(plain_width: int) -> Console:
    """The console; where there is no terminal to fit a table to, as wide as ``plain_width``."""
    console = Console()
    return console if console.is_terminal else Console(width=plain_width)


def module_command(module: str, arguments: Iterable[str]) -> list[str]:
    """Return the command that runs a module in a process of its own: the service's never imports torch."""
    return [sys.executable, "-m", module, *arguments]
