"""``winnow up``: the runtime and the service together, in the foreground."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from winnow_service.cli.models import ConsoleProgress
from winnow_service.cli.terminal import HostOption, PortOption, fail
from winnow_service.models import getting
from winnow_service.models.catalogue import ModelError
from winnow_service.supervisor import preflight, state
from winnow_service.supervisor.display import ConsoleDisplay
from winnow_service.supervisor.programs import (
    RUNTIME_HOST,
    Device,
    client_address,
    resolve,
    runtime_program,
    service_program,
)
from winnow_service.supervisor.supervisor import Supervisor

DEFAULT_MODEL = "needle"
STATE_DIRECTORY = Path(".winnow")


def up(
    runtime_arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- SGLANG_OPTION...]", help="Passed on to SGLang.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME|FOLDER", help="The model to serve; winnow models lists the names.")
    ] = DEFAULT_MODEL,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    runtime_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the runtime, on loopback.")] = 30000,
    device: Annotated[Device, typer.Option(help="Where the runtime computes.")] = Device.auto,
    state_dir: Annotated[Path, typer.Option(help="Where `winnow down` finds this process.")] = STATE_DIRECTORY,
) -> None:
    """Start SGLang and the service in front of it, and run both until Ctrl-C."""
    arguments = runtime_arguments or []
    try:
        preflight.check_runtime_installed()
        preflight.check_runtime_arguments(arguments)
        preflight.check_ports(host, port, runtime_port)
        preflight.check_device(device)
        device = resolve(device)
        with ConsoleProgress.shown() as progress:
            folder = getting.resolve(model, progress)
        preflight.check_model(folder)
        preflight.check_memory(folder, device)
    except (preflight.PreflightError, ModelError) as error:
        fail(error, 2)

    address = client_address(host, port)
    display = ConsoleDisplay(Console(), _ready_message(address, folder.name))
    supervisor = Supervisor(
        runtime_program(folder, device, runtime_port, arguments), service_program(host, port, runtime_port), display
    )
    own_state = state.State(
        pid=os.getpid(), address=address, runtime_address=client_address(RUNTIME_HOST, runtime_port)
    )
    try:
        with state.held(state_dir, own_state):
            status = asyncio.run(supervisor.run())
    except state.AlreadyRunning as error:
        where = f" at {error.state.address}, process {error.state.pid}" if error.state else ""
        fail(f"winnow up already runs here{where}; stop it with winnow down, or use another --state-dir", 2)
    raise typer.Exit(status)


def _ready_message(address: str, model: str) -> list[str]:
    if model == DEFAULT_MODEL:
        # It answers questions about a text that it is given, and no others.
        body = "@examples/buried-answer-16k.json"
    else:
        question = {"role": "user", "content": "What is the capital of France?"}
        body = shlex.quote(json.dumps({"model": model, "messages": [question]}))
    return [
        f"ready at {address}",
        f"console at {address}/console",
        f"curl -s {address}/v1/chat/completions -H 'content-type: application/json' -d {body}",
    ]
