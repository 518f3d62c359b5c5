"""``winnow fidelity``: how far each policy is from dense attention on a model, and what it reads for it."""

from __future__ import annotations

import subprocess
import sys

import typer

PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}


def fidelity(context: typer.Context) -> None:
    """Measure how far each policy is from dense attention on a model, and what it reads; --help tells all options."""
    # In a process of its own: the service's never imports torch.
    command = [sys.executable, "-m", "winnow_evaluation.fidelity", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
