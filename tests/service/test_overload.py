"""More requests than the runtimes take: who waits, who is refused, and what they are told."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.control import ADMIN_KEY, bearer, make_key, replica, runtime
from tests.service.fake_runtime import FakeRuntime
from tests.service.test_forwarding import key, samples
from tests.service.waiting import eventually

GATED: dict[str, Any] = {"stream": True, "fake": {"gated": True, "chunks": 1}}


@contextlib.asynccontextmanager
async def service(folder: Path, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FakeRuntime]]:
    store = f"sqlite:///{folder}/control.db"
    async with (
        runtime() as (fake, address),
        replica(store, address, metrics_public=True, admin_key=ADMIN_KEY, **settings) as client,
    ):
        yield client, fake


async def numbers(client: httpx.AsyncClient) -> tuple[float, float]:
    """How many requests run, and how many wait."""
    found = await samples(client)
    return found[key("winnow_admitted_requests")], found[key("winnow_queued_requests")]


async def until(client: httpx.AsyncClient, running: int, waiting: int) -> None:
    async def look() -> bool | None:
        return await numbers(client) == (running, waiting) or None

    await eventually(look)


def ask(client: httpx.AsyncClient, headers: dict[str, str], **body: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post("/generate", json={**GATED, **body}, headers=headers))


def code(answer: httpx.Response) -> tuple[int, str]:
    assert int(answer.headers["retry-after"]) >= 1
    return answer.status_code, answer.json()["error"]["code"]


async def test_beyond_the_queue_requests_are_refused_and_those_in_it_are_served(tmp_path: Path) -> None:
    async with service(tmp_path, max_running=2, max_queued=3, max_queued_per_key=2) as (client, fake):
        one, other = [bearer((await make_key(client))["key"]) for _ in range(2)]
        running = [ask(client, one) for _ in range(2)]
        await until(client, 2, 0)
        waiting = [ask(client, one) for _ in range(2)]
        await until(client, 2, 2)
        assert code(await ask(client, one)) == (429, "key_queue_full")
        waiting.append(ask(client, other))
        await until(client, 2, 3)
        assert code(await ask(client, other)) == (503, "queue_full")
        assert len(fake.asked) == 2

        for _ in range(5):
            fake.gate.release()
        answers = await asyncio.gather(*running, *waiting)
        assert [answer.text.count("data: ") for answer in answers] == [2] * 5
        await until(client, 0, 0)
        found = await samples(client)
        assert found[key("winnow_refusals_total", code="key_queue_full")] == 1
        assert found[key("winnow_refusals_total", code="queue_full")] == 1
        assert found[key("winnow_queue_wait_seconds_count")] == 5
        assert fake.most_concurrent <= 2


async def test_a_key_with_few_requests_does_not_wait_for_one_with_many(tmp_path: Path) -> None:
    async with service(tmp_path, max_running=2) as (client, fake):
        many, few = [bearer((await make_key(client))["key"]) for _ in range(2)]
        tasks = [ask(client, many, text="many") for _ in range(20)]
        await until(client, 2, 18)
        last = ask(client, few, text="few")
        await until(client, 2, 19)
        fake.gate.release()
        await until(client, 2, 18)
        # One slot was free, and it was the turn of the key that had none.
        await eventually(lambda: asked(fake, 3))
        assert b"few" in fake.asked[2].body
        for _ in range(20):
            fake.gate.release()
        await asyncio.gather(last, *tasks)


async def asked(fake: FakeRuntime, number: int) -> bool | None:
    return len(fake.asked) == number or None


async def test_nobody_waits_longer_than_the_bound(tmp_path: Path) -> None:
    async with service(tmp_path, max_running=1, queue_timeout_seconds=0.2) as (client, fake):
        headers = bearer(ADMIN_KEY)
        running = ask(client, headers)
        await until(client, 1, 0)
        assert code(await ask(client, headers)) == (503, "queue_timeout")
        assert await numbers(client) == (1, 0)
        fake.gate.release()
        assert (await running).status_code == 200


async def test_clients_that_leave_give_up_their_places(tmp_path: Path) -> None:
    async with service(tmp_path, max_running=1) as (client, fake):
        headers = bearer(ADMIN_KEY)
        running = ask(client, headers)
        await until(client, 1, 0)
        waiting = ask(client, headers)
        await until(client, 1, 1)
        waiting.cancel()
        await until(client, 1, 0)
        following = ask(client, headers)
        await until(client, 1, 1)
        running.cancel()
        await asyncio.wait_for(fake.aborted.wait(), 5)
        fake.gate.release()
        assert (await following).status_code == 200
        await until(client, 0, 0)
        assert len(fake.asked) == 2


@pytest.mark.parametrize("fake", [{"status": 400}, {"die": True}, {"die_after": 0}, {}])
async def test_every_end_frees_the_place(tmp_path: Path, fake: dict[str, Any]) -> None:
    async with service(tmp_path, max_running=1) as (client, _):
        for _ in range(3):
            body = {"stream": "die_after" in fake, "fake": fake}
            await client.post("/generate", json=body, headers=bearer(ADMIN_KEY))
        await until(client, 0, 0)


async def test_what_the_queue_refuses_costs_no_tokens(tmp_path: Path) -> None:
    async with service(tmp_path, max_running=1, max_queued=0) as (client, fake):
        limited = bearer((await make_key(client, limits={"tokens_per_minute": 300}))["key"])
        running = ask(client, bearer(ADMIN_KEY))
        await until(client, 1, 0)
        for _ in range(10):
            assert code(await ask(client, limited)) == (503, "queue_full")
        fake.gate.release()
        await running
        fake.gate.release()
        answer = await ask(client, limited)
        assert answer.status_code == 200
        assert '"requests"' not in answer.headers["ratelimit"]


async def test_who_leaves_before_the_whole_answer_pays_for_it(tmp_path: Path) -> None:
    async with service(tmp_path, max_running=1) as (client, fake):
        limited = bearer((await make_key(client, limits={"tokens_per_minute": 300}))["key"])

        async def ask_whole() -> httpx.Response:
            return await client.post("/generate", json={"fake": {"hang": True}}, headers=limited)

        for _ in range(2):
            leaving = asyncio.create_task(ask_whole())
            await until(client, 1, 0)
            leaving.cancel()
            await until(client, 0, 0)
        # Each may have had its 128 tokens; where none was left to run, nobody has.
        refused = await ask_whole()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        assert len(fake.asked) == 2


@pytest.mark.parametrize("shift", [-1e8, 1e8])
async def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_running": 1, "queue_timeout_seconds": 2.0, "breaker_failures": 1, "breaker_open_seconds": 1.0}
    async with service(tmp_path, **settings) as (client, fake):
        headers = bearer(ADMIN_KEY)
        limited = bearer((await make_key(client, limits={"requests_per_minute": 1}))["key"])
        fake.gate.release()
        assert (await ask(client, limited)).status_code == 200
        running, waiting = ask(client, headers), ask(client, headers)
        await until(client, 1, 1)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + shift)

        # Neither the wait nor the stream ends early, nor does the limit.
        await asyncio.sleep(0.3)
        assert not running.done()
        assert not waiting.done()
        refused = await ask(client, limited)
        assert code(refused) == (429, "rate_limited")
        assert 30 < int(refused.headers["retry-after"]) <= 61
        fake.gate.release()
        fake.gate.release()
        assert [(await task).status_code for task in (running, waiting)] == [200, 200]
        # The breaker opens, and closes when it should.
        assert (await client.post("/generate", json={"fake": {"die": True}}, headers=headers)).status_code == 502
        began = time.monotonic()
        assert code(await client.post("/generate", json={}, headers=headers)) == (503, "circuit_open")

        async def served() -> bool | None:
            return (await client.post("/generate", json={}, headers=headers)).status_code == 200 or None

        await eventually(served)
        assert time.monotonic() - began > 0.8
