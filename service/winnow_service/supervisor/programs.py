"""The command lines of the two programs that ``winnow up`` runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path

from winnow_service.supervisor.child import Program

RUNTIME_HOST = "127.0.0.1"
_ATTENTION_BACKEND = "--attention-backend"


class Device(StrEnum):
    """Where the runtime computes."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def resolve(device: Device) -> Device:
    """Replace ``auto`` by what this machine has."""
    if device is not Device.auto:
        return device
    return Device.cuda if has_cuda_gpu() else Device.cpu


def has_cuda_gpu() -> bool:
    """Whether NVIDIA's driver lists a GPU. Asks the driver, since asking torch takes seconds."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


def runtime_program(model: Path, device: Device, port: int, arguments: Sequence[str]) -> Program:
    """SGLang's server, reachable from this machine only. The model is served under its folder's name."""
    environment = {
        # Else /health generates a token, and says "unhealthy" while a long prompt is being read on a CPU.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"
    }
    if device is Device.cpu:
        # Without a visible GPU, Winnow's platform plugin takes over.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif _ATTENTION_BACKEND not in {argument.partition("=")[0] for argument in arguments}:
        # On a GPU SGLang would choose another one, and refuse policies.
        arguments = [_ATTENTION_BACKEND, "winnow", *arguments]
    command = [sys.executable, "-m", "sglang.launch_server", "--host", RUNTIME_HOST, "--port", str(port)]
    # The service asks /health every second.
    command += ["--uvicorn-access-log-exclude-prefixes", "/health"]
    command += ["--model-path", str(model), "--served-model-name", model.name, *arguments]
    return Program("runtime", command, f"http://{RUNTIME_HOST}:{port}/health", environment)


def service_program(host: str, port: int, runtime_port: int) -> Program:
    """The service in front of the runtime."""
    command = [sys.executable, "-m", "winnow_service.cli.serve", "--host", host, "--port", str(port)]
    command += ["--runtime-url", f"http://{RUNTIME_HOST}:{runtime_port}"]
    # Its lines are read by people, beside those of SGLang.
    environment = {"WINNOW_LOG_FORMAT": os.environ.get("WINNOW_LOG_FORMAT", "text")}
    return Program("service", command, f"{client_address(host, port)}/readyz", environment)


def client_address(host: str, port: int) -> str:
    """Where a client on this machine reaches a server that listens on ``host``."""
    try:
        address = ip_address(host)
    except ValueError:
        return f"http://{host}:{port}"
    if address.version == 6:
        return f"http://[{'::1' if address.is_unspecified else address}]:{port}"
    return f"http://{'127.0.0.1' if address.is_unspecified else address}:{port}"
