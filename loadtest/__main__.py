"""A load test from beginning to end: ``make loadtest``.

    python -m loadtest --url https://winnow.example.com --users 50 --seconds 300

Without ``--url`` it starts ``winnow up`` with the model that ships, and stops it in the end. What follows ``--`` goes
to Locust: the users' options, thresholds among them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import httpx
import typer

_LOCUSTFILE: Final = Path(__file__).with_name("locustfile.py")
_REPOSITORY: Final = Path(__file__).resolve().parents[1]
_FOLDER: Final = Path(".winnow")
_WINNOW: Final = (sys.executable, "-c", "from winnow_service.cli.main import app; app()")
_START_SECONDS: Final = 180.0
_STOP_SECONDS: Final = 60.0
# Of users that are in the middle of something when the time is over.
_GRACE_SECONDS: Final = 30


class NotStarted(Exception):
    """``winnow up`` did not become ready."""


def main(
    locust_options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- LOCUST_OPTION...]", help="Passed on to Locust.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Address of a running service [default: start one].")] = None,
    users: Annotated[int, typer.Option(min=5, help="Simulated users.")] = 5,
    seconds: Annotated[int, typer.Option(min=1, help="How long they come back.")] = 60,
    report: Annotated[Path, typer.Option(help="The HTML report.")] = _FOLDER / "loadtest.html",
) -> None:
    """Put a service under load; the exit status is 1 if it does not keep to the thresholds."""
    report.parent.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.nullcontext(url) if url else _own_service() as address:
            status = _locust(address, users, seconds, report, locust_options or [])
    except NotStarted as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{'passed' if status == 0 else 'FAILED'}; the report is {report}")
    raise typer.Exit(status)


def _locust(address: str, users: int, seconds: int, report: Path, options: list[str]) -> int:
    command = [sys.executable, "-m", "locust", "--locustfile", str(_LOCUSTFILE), "--host", address, "--headless"]
    command += ["--users", str(users), "--spawn-rate", str(users), "--run-time", f"{seconds}s"]
    command += ["--stop-timeout", str(_GRACE_SECONDS), "--html", str(report), "--only-summary", *options]
    path = os.pathsep.join(filter(None, (str(_REPOSITORY), os.environ.get("PYTHONPATH"))))
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode


@contextlib.contextmanager
def _own_service() -> Iterator[str]:
    """Run ``winnow up``; its output goes to a file."""
    port, runtime_port = _free_ports(2)
    address = f"http://127.0.0.1:{port}"
    _FOLDER.mkdir(exist_ok=True)
    log_file = _FOLDER / "loadtest-up.log"
    command = [*_WINNOW, "up", "--port", str(port), "--runtime-port", str(runtime_port)]
    command += ["--state-dir", str(_FOLDER / "loadtest")]
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        typer.echo(f"winnow up starts at {address}; its output is in {log_file}")
        _wait_until_ready(process, address, log_file)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], address: str, log_file: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    with httpx.Client(trust_env=False) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise NotStarted(f"winnow up ended: {log_file.read_text(errors='replace')[-2000:]}")
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{address}/readyz").status_code == 200:
                    return
            time.sleep(0.2)
    raise NotStarted(f"winnow up was not ready in {_START_SECONDS:g} seconds; its output is in {log_file}")


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


if __name__ == "__main__":
    typer.run(main)
