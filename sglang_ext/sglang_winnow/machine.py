"""What tells this machine from others: times that were measured on another one say nothing here."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch


@cache
def device_name() -> str:
    """Return the name of the GPU that a server would take here, or of the CPU if there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()


def cpu_name() -> str:
    """Return the CPU's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
