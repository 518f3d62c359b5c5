"""Starting and stopping real servers on free ports."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from sglang_winnow.profile_settings import PROFILE
from tests.deployment.repository import ROOT
from tests.ports import free_port
from tests.profiles import curve, profile
from tests.service.processes import WINNOW, alive, descendants
from winnow_kernels.policies.registry import DECODE_POLICIES, POLICIES_SETTING

START_SECONDS = 240
STOP_SECONDS = 60
NEEDLE = ROOT / "models/needle"
PROFILE_LENGTHS = (1024, 20_000)
NEAR, FAR = ({"decode": {"policy": "lowbit_top_k", "budget": budget}} for budget in (1024, 128))
CURVES = [
    curve(NEAR, dict.fromkeys(PROFILE_LENGTHS, (0.01, 0.99, 0.3))),
    curve(FAR, dict.fromkeys(PROFILE_LENGTHS, (0.05, 0.9, 0.1))),
]


@dataclass(frozen=True)
class Deployment:
    """A service, its runtime, and the process that runs what answers at ``address``."""

    address: str
    runtime_address: str
    process: subprocess.Popen[bytes]
    log: Path

    def running_requests(self) -> int:
        """How many requests the runtime computes or has queued, by its own account."""
        loads = httpx.get(f"{self.runtime_address}/v1/loads", timeout=30).json()["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    def wait_for_requests(self, number: int, timeout_seconds: float) -> None:
        """Wait until the runtime has so many requests."""
        deadline = time.monotonic() + timeout_seconds
        while (running := self.running_requests()) != number:
            assert time.monotonic() < deadline, f"{running} requests run after {timeout_seconds} s, not {number}"
            time.sleep(0.05)


def start_up(folder: Path) -> Deployment:
    """``winnow up`` with the shipped model, ready. It chooses policies by a profile whose figures are made up."""
    port, runtime_port = free_port(), free_port()
    log = folder / "log"
    command = [*WINNOW, "up", "--device", "cpu", "--port", str(port), "--runtime-port", str(runtime_port)]
    profile(NEEDLE, PROFILE_LENGTHS, CURVES).write(folder / "profile.json")
    # Policies act at the lengths of tests.
    process = start(command, log, {"WINNOW_CROSSOVER_TOKENS": "0", PROFILE: str(folder / "profile.json")})
    deployment = Deployment(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{runtime_port}", process, log)
    wait_ready(deployment)
    return deployment


def start(command: list[str], log: Path, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            cwd=log.parent,
            # On a GPU not every policy is served unless it is named.
            env=os.environ | {POLICIES_SETTING: ",".join(DECODE_POLICIES)} | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def wait_ready(deployment: Deployment) -> None:
    wait_readiness(deployment, 200, START_SECONDS)


def wait_readiness(deployment: Deployment, status: int, timeout_seconds: float) -> str:
    """Wait until ``/readyz`` answers with ``status``; returns the reason that it gives."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        assert deployment.process.poll() is None, deployment.log.read_text()[-3000:]
        assert time.monotonic() < deadline, deployment.log.read_text()[-3000:]
        try:
            answer = httpx.get(f"{deployment.address}/readyz", timeout=10)
        except httpx.TransportError:
            pass
        else:
            if answer.status_code == status:
                reason: str = answer.json()["reason"]
                return reason
        time.sleep(0.1)


def stop(process: subprocess.Popen[bytes]) -> int:
    """Stop ``process`` as Ctrl-C does and return its status. Nothing of it may be left."""
    below = descendants(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    status = process.wait(STOP_SECONDS)
    left = [pid for pid in below if alive(pid)]
    assert not left, f"processes {left} were left behind"
    return status


def runtime_pid(process: subprocess.Popen[bytes]) -> int:
    """The process of SGLang's HTTP server below ``winnow up``: the parent of SGLang's other processes."""
    [pid] = [
        pid
        for pid in descendants(process.pid)
        if (command := Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))[1:3] == [b"-m", b"sglang.launch_server"]
        and command
    ]
    return pid
