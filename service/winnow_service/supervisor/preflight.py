"""What ``winnow up`` checks before it starts anything. Each failure says what to do."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from winnow_service.supervisor.programs import RUNTIME_HOST, Device, has_cuda_gpu

GIB = 1024**3
CGROUP = Path("/sys/fs/cgroup")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
# Three processes with torch in each, activations, and the smallest useful KV cache.
RUNTIME_MARGIN_BYTES = 3 * GIB
_OWN_OPTIONS = {
    "--host": "nothing: the runtime is reached from this machine only",
    "--port": "--runtime-port",
    "--model": "--model",
    "--model-path": "--model",
    "--device": "--device",
}


class PreflightError(Exception):
    """Nothing was started; the message is one line."""


def check_runtime_installed() -> None:
    """SGLang can be started."""
    if importlib.util.find_spec("sglang") is None:
        raise PreflightError("SGLang is not installed; install it with: pip install 'sglang-winnow[runtime]'")


def check_runtime_arguments(arguments: Sequence[str]) -> None:
    """No argument for SGLang contradicts an option of ``winnow up``."""
    for argument in arguments:
        if instead := _OWN_OPTIONS.get(argument.partition("=")[0]):
            raise PreflightError(f"{argument} cannot be passed on to SGLang; use {instead}")


def check_device(device: Device) -> None:
    """A GPU that was asked for is there."""
    if device is Device.cuda and not has_cuda_gpu():
        raise PreflightError("nvidia-smi lists no GPU; use --device cpu, or install NVIDIA's driver")


def check_model(model: Path) -> None:
    """The folder ``model`` has a model's configuration."""
    if not (model / "config.json").is_file():
        raise PreflightError(f"{model} has no config.json, so it is no model; name another with --model NAME|FOLDER")


def check_ports(host: str, port: int, runtime_port: int) -> None:
    """Both ports can be listened on."""
    if port == runtime_port:
        raise PreflightError(f"--port and --runtime-port are both {port}; choose two ports")
    _check_port(host, port, "--port")
    _check_port(RUNTIME_HOST, runtime_port, "--runtime-port")


def _check_port(host: str, port: int, option: str) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise PreflightError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another with {option}"
        ) from None


def check_memory(model: Path, device: Device) -> None:
    """Compare the weights, and what the runtime needs beside them, with what is free on ``device``."""
    weights = sum(file.stat().st_size for file in model.iterdir() if file.suffix in _WEIGHT_SUFFIXES)
    needed = weights + RUNTIME_MARGIN_BYTES
    available = free_gpu_bytes() if device is Device.cuda else available_memory_bytes()
    if available is not None and available < needed:
        where = "GPU memory" if device is Device.cuda else "memory"
        raise PreflightError(
            f"{model} needs about {needed / GIB:.1f} GiB of {where} ({weights / GIB:.1f} GiB of weights and "
            f"{RUNTIME_MARGIN_BYTES / GIB:.1f} GiB beside them) and {available / GIB:.1f} GiB are free; "
            "stop other programs or choose a smaller model with --model NAME|FOLDER"
        )


def available_memory_bytes() -> int | None:
    """Memory that can still be had, by the machine's count and the container's; None if neither can be read."""
    bounds = [bound for bound in (_machine_memory(), _cgroup_memory()) if bound is not None]
    return min(bounds, default=None)


def _machine_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_memory() -> int | None:
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        cache = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    # Clean file cache is counted as used, but is given up when memory is asked for.
    return None if limit == "max" else int(limit) - used + int(cache.get("inactive_file", 0))


def free_gpu_bytes() -> int | None:
    """Free memory of all GPUs together; None if the driver does not say."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    free = [line.strip() for line in answer.stdout.splitlines()]
    if answer.returncode != 0 or not free or not all(line.isdecimal() for line in free):
        return None
    return sum(int(line) for line in free) * 1024**2
