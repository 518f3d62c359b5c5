"""Load tests: how they read streams, what they judge, and that they run, in processes of their own as Locust must."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.serving.overhead.process import Pair, started
from loadtest.streaming import StreamBroken, error_code, read_stream
from loadtest.thresholds import Outcome, Thresholds, violations
from tests.service.processes import descendants
from tests.service.test_up import FAKE_SGLANG, ROOT

KINDS = ("chat", "long document", "reasoning")
BOUNDS = Thresholds(failure_ratio=0.1, ttft_p95=2, tpot_p95=0.5)
GOOD = Outcome(requests=10, failures=1, finished=dict.fromkeys(KINDS, 1), ttft_p95=2, tpot_p95=0.5)


def read(*events: str) -> Any:
    """Read a stream whose events come at 1, 2, ... seconds."""
    lines = [line for event in events for line in (f"data: {event}".encode(), b"")]
    return read_stream(lines, started=0, clock=itertools.count(1).__next__)


CHUNK = '{"choices": [{"delta": {"content": "word "}}]}'
USAGE = '{"choices": [], "usage": {"completion_tokens": 5}}'


def test_times_are_from_the_first_event_to_the_last_with_text() -> None:
    times = read(CHUNK, CHUNK, CHUNK, USAGE, "[DONE]")
    assert (times.ttft, times.last, times.end) == (1, 3, 5)
    assert times.tokens == 5
    assert times.tpot == (3 - 1) / 4
    assert times.text == "word word word "


def test_without_usage_events_are_counted() -> None:
    assert read(CHUNK, CHUNK, '{"choices": [], "attention": {}}', "[DONE]").tokens == 2
    assert read(CHUNK, "[DONE]").tpot is None


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([CHUNK], "incomplete"),
        ([], "incomplete"),
        (["[DONE]"], "empty"),
        ([CHUNK, '{"error": {"code": "runtime_died"}}', "[DONE]"], "runtime_died"),
        ([CHUNK, "{", "[DONE]"], "not_json"),
        (["5"], "not_json"),
    ],
)
def test_a_stream_that_is_not_complete_is_told(events: list[str], says: str) -> None:
    with pytest.raises(StreamBroken, match=says):
        read(*events)


@pytest.mark.parametrize("problem", [None, [], {"error": "no"}, {"error": {"code": None}}])
def test_an_error_without_a_code_is_unknown(problem: object) -> None:
    assert error_code(problem) == "unknown"


def test_what_keeps_to_the_thresholds_violates_none() -> None:
    assert violations(GOOD, BOUNDS) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"failures": 2}, "20.0% of requests failed"),
        ({"requests": 0, "failures": 0}, "100.0% of requests failed"),
        ({"ttft_p95": 2.1}, "first token (95th percentile) is 2.1 s, more than 2 s"),
        ({"tpot_p95": 0.6}, "per output token (95th percentile) is 0.6 s"),
        ({"ttft_p95": None}, "first token was not measured"),
        ({"tpot_p95": None}, "per output token was not measured"),
        ({"finished": {"chat": 3, "reasoning": 0}}, "no answer to a reasoning user"),
    ],
)
def test_each_threshold_is_judged(changes: dict[str, Any], says: str) -> None:
    [violation] = violations(replace(GOOD, **changes), BOUNDS)
    assert says in violation


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    """The service in front of a stand-in for the runtime."""
    async with started() as running:
        yield running


async def loadtest(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run a load test; returns its exit status and output. It must leave no process behind."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtest", *arguments),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{FAKE_SGLANG}:{ROOT}", **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(120):
        output, _ = await process.communicate()
    assert not descendants(process.pid)
    assert process.returncode is not None
    return process.returncode, output.decode()


SHORT = ("--chat-tokens", "8", "--document-tokens", "4", "--reasoning-tokens", "12")


async def test_a_load_test_reports_each_kind_of_user_and_policy(pair: Pair, tmp_path: Path) -> None:
    arguments = ("--url", pair.service.address, "--seconds", "4", "--report", "r.html", "--", *SHORT)
    options = ("--policies", "default,balanced")
    status, output = await loadtest(tmp_path, *arguments, *options, WINNOW_API_KEY=pair.admin_key)
    assert status == 0, output
    report = (tmp_path / "r.html").read_text()
    for kind in KINDS:
        assert re.search(rf"TTFT\s+{kind}, (default|balanced) ", output), output
        assert kind in report
    for metric in ("TTFT", "TPOT"):
        assert f'"{metric}"' in report
    assert pair.admin_key not in output + report


async def test_a_load_test_fails_by_its_thresholds(pair: Pair, tmp_path: Path) -> None:
    arguments = ("--url", pair.service.address, "--seconds", "2", "--", *SHORT)
    status, output = await loadtest(tmp_path, *arguments, "--max-ttft-p95", "0.001", WINNOW_API_KEY=pair.admin_key)
    assert status == 1
    assert "FAILED: the time to first token (95th percentile)" in output

    status, output = await loadtest(tmp_path, *arguments)
    assert status == 1
    assert "no answer to a chat user was complete" in output
    assert "lists no model: 401 missing_key" in output


async def test_a_load_test_starts_a_service_of_its_own(tmp_path: Path) -> None:
    options = ("--model", "needle", "--policies", "default,exact", "--max-ttft-p95", "10")
    environment = {"FAKE_PIDS": str(tmp_path / "pids"), "CUDA_VISIBLE_DEVICES": ""}
    status, output = await loadtest(tmp_path, "--seconds", "3", "--", *options, **environment)
    assert status == 0, output
    assert (tmp_path / ".winnow/loadtest.html").exists()


async def test_a_service_that_does_not_start_is_told(tmp_path: Path) -> None:
    # The fake runtime cannot say which processes it is.
    status, output = await loadtest(tmp_path, "--seconds", "3", FAKE_PIDS=str(tmp_path / "none/pids"))
    assert status == 2
    assert "winnow up ended" in output
