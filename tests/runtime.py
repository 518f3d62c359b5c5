"""A real SGLang server for tests, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.ports import free_port
from winnow_kernels.policies.registry import DECODE_POLICIES, POLICIES_SETTING

START_SECONDS = 280
STOP_SECONDS = 30


@dataclass(frozen=True)
class Runtime:
    """A server that is ready."""

    url: str
    log: Path


@contextlib.contextmanager
def runtime_server(
    model: Path, *arguments: str, log: Path, python: str = sys.executable, **environment: str
) -> Iterator[Runtime]:
    """Serve the model in folder ``model`` on a free port until the block ends; its output goes to the file ``log``.

    The server runs in the environment of the interpreter ``python``.

    Raises:
        RuntimeError: the server ended, or was not ready within ``START_SECONDS``.
    """
    port = free_port()
    command = [python, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    settings = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", "HF_HUB_OFFLINE": "1"}
    # SGLang compiles a few functions for the CPU when a request first needs them, which takes longer than the request.
    settings |= {"TORCHDYNAMO_DISABLE": "1"}
    # On a GPU not every policy is served unless it is named.
    settings |= {POLICIES_SETTING: ",".join(DECODE_POLICIES)} | environment
    runtime = Runtime(f"http://127.0.0.1:{port}", log)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | settings, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _wait_until_ready(process, runtime)
            yield runtime
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], runtime: Runtime) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(0.2)
            raise RuntimeError(f"SGLang ended with {status}:\n{_end_of(runtime.log)}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{runtime.url}/health", timeout=5).is_success:
                return
    raise RuntimeError(f"SGLang is not ready after {START_SECONDS} s:\n{_end_of(runtime.log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]
