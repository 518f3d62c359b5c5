"""``winnow fidelity``: how far each policy is from dense attention on a model, and what it reads for it."""

from __future__ import annotations

import subprocess

import typer

from winnow_service.cli.terminal import module_command


def fidelity(context: typer.Context) -> None:
    """Measure how far each policy is from dense attention on a model, and what it reads; --help tells all options."""
    raise typer.Exit(subprocess.run(module_command("winnow_evaluation.fidelity", context.args), check=False).returncode)
