"""Test-session rules: a run in which nothing passed is a failure, and a long run leaves a record.

A process runs all tests of a file, and all that share a real server. The files that start one take longest: they are
first, so that no process is left alone with them at the end.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from tests.tested_releases import KINDS, note_tested

SHARED_SERVERS = (
    ("tests/end_to_end/",),
    ("tests/sglang_ext/test_admission_server.py", "tests/sglang_ext/test_policy_server.py"),
)
RECORDED_VERSIONS = ("sglang-winnow", "sglang", "torch", "flashinfer-python", "transformers", "fastapi", "pydantic")

# How long an example takes is for benchmarks to say: a busy machine is no failure.
settings.register_profile("winnow", deadline=None)
settings.load_profile("winnow")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tested", choices=KINDS, help="note that the installed release of SGLang passed tests of a kind")
    parser.addoption("--record", type=Path, metavar="FOLDER", help="write test-full-<date>.json to FOLDER")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--tested") == "cuda" and not _kernels_run_on_a_gpu():
        raise pytest.UsageError("--tested=cuda: there is no GPU, or Triton interprets kernels")
    config.pluginmanager.register(
        SessionOutcome(config.getoption("--record"), config.getoption("--tested")), "session-outcome"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, object, object]:
    """Keep finalizers out while failures are written, which parses sources.

    One that logs a traceback parses as well, and Python 3.11 cannot do both at once: the session would end with "AST
    constructor recursion depth mismatch" (python/cpython#106905) instead of the failure.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not (_sharing(item.nodeid) or hasattr(getattr(item, "module", None), "runtime_server")))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


class _Scheduling(LoadFileScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        sharing = _sharing(nodeid)
        return sharing[0] if sharing else super()._split_scope(nodeid)


def _sharing(nodeid: str) -> tuple[str, ...] | None:
    return next((files for files in SHARED_SERVERS if nodeid.startswith(files)), None)


class SessionOutcome:
    """What became of each test of the session."""

    def __init__(self, record_folder: Path | None, tested: str | None) -> None:
        self.record_folder = record_folder
        self.tested = tested
        self.started = time.monotonic()
        self.outcomes: dict[str, str] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" or not report.passed:
            self.outcomes[report.nodeid] = "error" if report.failed and report.when != "call" else report.outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # A process that runs tests for another, which sees all outcomes.
        if session.config.option.collectonly or hasattr(session.config, "workerinput"):
            return
        if session.exitstatus == pytest.ExitCode.OK and "passed" not in self.outcomes.values():
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        if self.tested and session.exitstatus == pytest.ExitCode.OK:
            note_tested(self.tested, Counter(self.outcomes.values())["passed"], _git("rev-parse", "HEAD"))
        if self.record_folder:
            self.write_record(self.record_folder, int(session.exitstatus))

    def write_record(self, folder: Path, exit_status: int) -> None:
        now = datetime.now(UTC)
        record = {
            "finished": now.isoformat(timespec="seconds"),
            "commit": _git("rev-parse", "HEAD"),
            "uncommitted_changes": bool(_git("status", "--porcelain")),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in RECORDED_VERSIONS},
            "machine": {"architecture": platform.machine(), "cores": os.cpu_count()},
            "exit_status": exit_status,
            "seconds": round(time.monotonic() - self.started, 1),
            "counts": dict(Counter(self.outcomes.values())),
            "tests": [
                {"id": test, "outcome": outcome, "seconds": round(self.seconds[test], 2)}
                for test, outcome in self.outcomes.items()
            ],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"test-full-{now:%Y-%m-%d}.json").write_text(json.dumps(record, indent=2) + "\n")


def _kernels_run_on_a_gpu() -> bool:
    import torch  # noqa: PLC0415

    return torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


def _git(*arguments: str) -> str | None:
    if shutil.which("git") is None:
        return None
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, timeout=30)
    return result.stdout.strip() if result.returncode == 0 else None
