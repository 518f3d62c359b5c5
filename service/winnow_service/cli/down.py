"""``winnow down``: stops what ``winnow up`` started."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from winnow_service.cli.terminal import fail
from winnow_service.cli.up import STATE_DIRECTORY
from winnow_service.supervisor import state

# More than the supervisor's own limits for its children together.
_TIMEOUT_SECONDS = 60.0


def down(
    state_dir: Annotated[Path, typer.Option(help="The one that `winnow up` was started with.")] = STATE_DIRECTORY,
) -> None:
    """Stop the running `winnow up`, and wait until it has ended."""
    running = state.running(state_dir)
    if running is None:
        typer.echo("winnow up is not running here")
        return
    # A process that has ended in this moment needs no signal.
    with suppress(ProcessLookupError):
        os.kill(running.pid, signal.SIGTERM)
    if not state.wait_until_ended(state_dir, _TIMEOUT_SECONDS):
        fail(f"process {running.pid} still runs after {_TIMEOUT_SECONDS:g} seconds")
    typer.echo(f"stopped winnow up at {running.address}")
