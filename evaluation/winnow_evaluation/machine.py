"""What a measurement ran on, for its record."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sglang_winnow.machine import cpu_name
from winnow_evaluation.environment import checkout_commit, installed_versions


@dataclass(frozen=True)
class Cpu:
    """The CPU, and how many of its threads this process may use."""

    model: str
    threads: int


def cpu() -> Cpu:
    """Return this machine's CPU."""
    return Cpu(cpu_name(), len(os.sched_getaffinity(0)))


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
