"""Reading a profiler's report, and what is made of it; the profiler itself needs a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import dram
from benchmarks.kernels.cases import Case
from benchmarks.kernels.dram import Selected, delivered_bytes, profile, row_of

REPORT = """==PROF== Connected to process 7
==PROF== Profiling "attend_kernel" - 0: 0%....100% - 1 pass
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","attend_kernel","dram__bytes_read.sum","byte","1,073,741,824"
"1","7","attend_kernel","dram__bytes_read.sum","byte","6"
==PROF== Disconnected
"""


def test_bytes_of_all_launches_are_summed() -> None:
    assert delivered_bytes(REPORT.splitlines()) == (1 << 30) + 6


def test_a_report_without_launches_is_no_zero() -> None:
    with pytest.raises(RuntimeError, match="no launch"):
        delivered_bytes(["==WARNING== No kernels were profiled."])


def test_counted_and_delivered_bytes_come_from_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def ncu(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        Path(command[command.index("--log-file") + 1]).write_text(REPORT)
        Path(command[-1]).write_text("1000000000")
        assert command[-5:-1] == ["512", "2", "tokens", "5"]
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", ncu)
    counted, delivered = profile(Case(512, 2), Selected("tokens", 5))
    row = row_of(Case(512, 2), Selected("tokens", 5), counted, delivered)
    assert row.measured == (1 << 30) + 6
    assert row.parameters["delivered_to_counted"] == pytest.approx(1.073741830)


def test_what_the_profiler_says_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def ncu(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "==ERROR== ERR_NVGPUCTRPERM", "")

    monkeypatch.setattr(subprocess, "run", ncu)
    with pytest.raises(RuntimeError, match="ERR_NVGPUCTRPERM"):
        dram.profile(Case(512, 2), Selected("tokens", 5))
