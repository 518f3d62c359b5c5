"""What a measurement ran on, for its record."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from winnow_evaluation.environment import checkout_commit, installed_versions


@dataclass(frozen=True)
class Cpu:
    """The CPU, and how many of its threads this process may use."""

    model: str
    threads: int


def cpu() -> Cpu:
    """Return this machine's CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return Cpu(models[0] if models else platform.processor(), len(os.sched_getaffinity(0)))


def surroundings(*distributions: str) -> dict[str, Any]:
    """Return date, commit, CPU, versions, and what else kept the machine busy as this was called.

    Args:
        distributions: whose versions are told, too, if they are installed.
    """
    commit = checkout_commit()
    own = cpu()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.model_dump() if commit else None,
        "cpu": own.model,
        "cpu_threads": own.threads,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_average": os.getloadavg()[0],
        "versions": installed_versions("torch", *distributions),
    }
