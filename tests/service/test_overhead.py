"""What the service costs in front of a stand-in for the runtime: that it is measured, and what must hold anywhere."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import asdict

import pytest
import pytest_asyncio

from benchmarks.folders import RESULTS
from benchmarks.serving.overhead import measure
from benchmarks.serving.overhead.process import Pair, started
from benchmarks.serving.overhead.standin import Pace
from benchmarks.serving.overhead.streams import Incomplete, Tally, Target, stream
from benchmarks.serving.overhead.table import markdown
from benchmarks.serving.service_overhead import Plan, limited, measured, plain

STREAMS = 600
AT_ONCE = 500
# A stream that left a kilobyte behind would come to ten times as much.
MAX_GROWTH_BYTES_A_MINUTE = 128 * 1024
MEMORY_STREAMS = 32
STREAM_SECONDS = 1.05
# Half an hour is what counts; less, but more than the warm-up, is to try the test.
MINUTES = float(os.environ.get("MEMORY_MINUTES", "30"))
# Limits keep what was used in the last minute, and the allocator has settled after another.
WARM_UP_MINUTES = max(MINUTES / 3, 2)


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    async with started() as running:
        yield running


async def test_hundreds_of_streams_are_open_at_once_and_all_end(pair: Pair) -> None:
    found = await measure.many_streams(pair.service, await limited(pair), STREAMS, seconds=12)
    assert found.open_at_once >= AT_ONCE
    assert found.finished == STREAMS


@pytest.mark.full
async def test_everything_is_measured_and_written_down() -> None:
    plan = Plan(streams=4, interval=0.05, seconds=2, requests=20, many=8, memory_seconds=3, warm_up=1, sample_every=0.5)
    found = await measured(plan)
    for caller in ("plain", "limited"):
        assert found["chunk_cost"][caller]["chunks_per_second"] == pytest.approx(4 / 0.05, rel=0.2)
        assert found["chunk_cost"][caller]["microseconds_per_chunk"] > 0
        assert found["request_cost"][caller]["microseconds_per_request"] > 0
    assert [ttft["beside"] for ttft in found["added_ttft"]] == [0, 4]
    for ttft in found["added_ttft"]:
        assert ttft["through"] > ttft["direct"] > 0.02
        assert ttft["added"] == ttft["through"] - ttft["direct"]
    assert found["many_streams"]["finished"] == 8
    assert len(found["memory"]["samples"]) == 6
    record = json.loads((RESULTS / "service-overhead.json").read_text()) | {"measured": found}
    assert "8 of 8 open at once, 8 complete" in markdown(record)


async def test_a_stream_that_is_not_complete_is_not_measured(pair: Pair) -> None:
    tally = Tally()
    await stream(plain(pair), Pace(2, first=0.01, interval=0.01), tally)
    assert (tally.finished, tally.broken, tally.events) == (1, 0, 4)
    stranger = Target(pair.service.address)
    await stream(stranger, Pace(2, first=0.01, interval=0.01), tally)
    assert (tally.finished, tally.broken) == (1, 1)
    assert "401" in tally.refusals[0]
    with pytest.raises(Incomplete, match="0 of 3 streams were complete"):
        await measure.request_cost(pair.service, stranger, 3)


@pytest.mark.parametrize(("left_behind", "is_flat"), [(0, True), (64, True), (1024, False)])
def test_what_streams_leave_behind_is_seen_as_growth(left_behind: int, is_flat: bool) -> None:
    resident = 100 * 1024 * 1024
    # Memory is taken in steps, and some of it is given back.
    wobble = [0, 256 * 1024, 512 * 1024, 128 * 1024]
    streams_a_second = MEMORY_STREAMS / STREAM_SECONDS
    samples = [
        (float(at), resident + wobble[at // 10 % 4] + round(at * streams_a_second * left_behind))
        for at in range(10, 1810, 10)
    ]
    # What is taken while it warms up does not count.
    samples = [(at, size if at >= 600 else size // 2) for at, size in samples]
    assert (measure.growth(samples, warm_up=600) < MAX_GROWTH_BYTES_A_MINUTE) == is_flat


@pytest.mark.full
@pytest.mark.timeout((MINUTES + 5) * 60)
async def test_memory_is_flat_over_half_an_hour(pair: Pair) -> None:
    seconds = MINUTES * 60
    found = await measure.memory(
        pair.service,
        await limited(pair),
        MEMORY_STREAMS,
        seconds,
        warm_up=WARM_UP_MINUTES * 60,
        sample_every=seconds / 180,
    )
    # A third of what there would be if streams took no longer than they are paced.
    assert found.streams > seconds * MEMORY_STREAMS / STREAM_SECONDS / 3
    assert found.slope < MAX_GROWTH_BYTES_A_MINUTE, asdict(found)
