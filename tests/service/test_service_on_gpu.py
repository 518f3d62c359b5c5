"""The service beside the runtime behind it: that the script measures what it says, in front of the stand-in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from benchmarks.serving.overhead.beside_runtime import (
    NotComparable,
    Plan,
    Way,
    measured_throughput,
    measured_ttft,
    prepare,
)
from benchmarks.serving.overhead.beside_table import service_table
from benchmarks.serving.overhead.process import started
from benchmarks.serving.overhead.standin import MODEL
from benchmarks.serving.overhead.streams import Incomplete
from benchmarks.serving.service_on_gpu import app, header

PLAN = Plan(streams=4, tokens=16, prompt_words=20, ttft_seconds=0, throughput_seconds=0)
# The stand-in's own pace.
FIRST_SECONDS, INTERVAL_SECONDS = 0.05, 0.01


@pytest_asyncio.fixture
async def ways() -> AsyncIterator[tuple[Way, Way]]:
    async with started() as pair:
        key = {"authorization": f"Bearer {pair.admin_key}"}
        yield Way("runtime", pair.standin.address), Way("service", pair.service.address, key)


async def test_both_ways_are_measured(ways: tuple[Way, Way]) -> None:
    assert await prepare(*ways, PLAN) == {"model": MODEL}
    ttft = await measured_ttft(*ways, PLAN)
    assert ttft.pairs == 20
    assert FIRST_SECONDS < ttft.bare < ttft.service
    assert ttft.added == ttft.service - ttft.bare
    assert ttft.added_low <= ttft.added <= ttft.added_high
    throughput = await measured_throughput(*ways, PLAN)
    assert len(throughput.bare) == len(throughput.service) == 2
    lengths = [PLAN.tokens_of(number) for number in range(PLAN.requests)]
    assert (throughput.requests, throughput.tokens) == (16, sum(lengths))
    assert len(set(lengths)) > 4
    paced = sum(FIRST_SECONDS + (each - 1) * INTERVAL_SECONDS for each in lengths)
    assert 0 < max(*throughput.bare, *throughput.service) <= PLAN.streams * sum(lengths) / paced
    assert -1 < throughput.lost < 1
    # Its process was seen to compute.
    assert throughput.cpu_per_token is not None
    assert throughput.cpu_per_token > 0


async def test_what_cannot_be_compared_is_not(ways: tuple[Way, Way]) -> None:
    bare, service = ways
    with pytest.raises(NotComparable, match="service: /v1/models was answered with status 401"):
        await prepare(bare, replace(service, headers={}), PLAN)
    # The stand-in counts chunks, of which the last ends the answer: a plan that it cannot keep.
    with pytest.raises(NotComparable, match="asked for, and had"):
        await prepare(bare, service, _Short(**vars(PLAN)))
    with pytest.raises(Incomplete, match="0 of 16 streams were complete"):
        await measured_throughput(replace(bare, address=service.address), service, PLAN)


class _Short(Plan):
    """Asks for fewer tokens than it counts on."""

    def body(self, number: int, tokens: int) -> dict[str, Any]:
        return super().body(number, tokens - 1)


RECORD: dict[str, Any] = {
    "header": header() | {"device": "GPU", "runtime": {"model": "m", "version": "0.5.16", "attention_backend": "fa3"}},
    "ttft": {
        "pairs": 200,
        "bare": 0.020,
        "service": 0.022,
        "added": 0.002,
        "added_low": 0.0019,
        "added_high": 0.0021,
        "bare_p95": 0.021,
        "service_p95": 0.025,
    },
    "throughput": {
        "streams": 64,
        "requests": 256,
        "tokens": 32000,
        "bare": [5000.0, 5000.0],
        "service": [4700.0, 4900.0],
        "lost": 0.041,
        "bare_ttft": 0.1,
        "service_ttft": 0.11,
        "cpu_per_token": None,
    },
}


def test_the_table_says_what_was_asked_and_what_was_missed(tmp_path: Path) -> None:
    path = tmp_path / "service.json"
    path.write_text(json.dumps(RECORD))
    table = service_table(path)
    assert "| 20.0 | 22.0 | +2.0 [+1.9, +2.1] | at most +3.0 |" in table
    assert "| 5,000 | 4,798 | -4.1% [-6.0%, -2.0%] (missed) | at most -3% |" in table
    assert "m on SGLang 0.5.16, attention backend fa3" in table
    assert "CPU time" not in table
    shown = CliRunner().invoke(app, ["table", "--record", str(path)])
    assert shown.stdout.strip() == table.strip()


def test_a_runtime_that_is_away_is_an_error(tmp_path: Path) -> None:
    away = ["--runtime-url", "http://127.0.0.1:9", "--service-url", "http://127.0.0.1:9"]
    done = CliRunner().invoke(app, ["run", *away, "--output", str(tmp_path / "x.json")])
    assert done.exit_code == 1
    assert "error: " in done.stderr
    assert not (tmp_path / "x.json").exists()
