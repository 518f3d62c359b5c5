"""Several runtimes behind one service: who gets what, and what happens when one fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import ValidationError

from tests.ports import free_port
from tests.service.control import replica
from tests.service.fake_runtime import FakeRuntime
from tests.service.servers import serving
from tests.service.test_attention import SERVED
from tests.service.test_forwarding import key, samples
from tests.service.waiting import eventually
from winnow_service.settings import Settings

CHAT = "/v1/chat/completions"
BREAKER_SECONDS = 0.5


class Fake:
    """A runtime on a port of its own, which can be started and stopped."""

    def __init__(self) -> None:
        self.runtime = FakeRuntime()
        self.runtime.server_info = {"winnow": SERVED}
        self.port = free_port()
        self.name = f"127.0.0.1:{self.port}"
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        await self._stack.enter_async_context(serving(self.runtime.app(), self.port, grace_seconds=1))

    async def stop(self) -> None:
        await self._stack.aclose()


@dataclass(frozen=True)
class Fleet:
    """A service in front of two runtimes."""

    client: httpx.AsyncClient
    fakes: list[Fake]

    async def until(self, **wanted: Any) -> dict[str, Any]:
        """Wait until /readyz says that."""

        async def look() -> dict[str, Any] | None:
            state: dict[str, Any] = (await self.client.get("/readyz")).json()
            return state if all(state[name] == value for name, value in wanted.items()) else None

        return await eventually(look)

    def asked(self) -> list[int]:
        return [len(fake.runtime.asked) for fake in self.fakes]


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """Two runtimes that run."""
    fakes = [Fake(), Fake()]
    for fake in fakes:
        await fake.start()
    addresses = ",".join(f"http://{fake.name}" for fake in fakes)
    store = f"sqlite:///{tmp_path}/control.db"
    # Seldom enough for requests to be the first to find that a runtime is gone.
    async with replica(store, addresses, readiness_interval_seconds=2.0) as client:
        fleet = Fleet(client, fakes)
        try:
            await fleet.until(ready=True, degraded=False)
            yield fleet
        finally:
            for fake in fakes:
                await fake.stop()


def conversation(number: int, *more: str) -> dict[str, Any]:
    contents = ["Be brief.", f"Conversation {number}", *more]
    return {
        "messages": [{"role": "user" if index else "system", "content": text} for index, text in enumerate(contents)]
    }


async def test_a_conversation_stays_with_its_runtime_and_others_spread(fleet: Fleet) -> None:
    homes = []
    for number in range(20):
        before = fleet.asked()
        for turn in range(3):
            assert (await fleet.client.post(CHAT, json=conversation(number, *["More"] * turn))).status_code == 200
        got = [now - then for now, then in zip(fleet.asked(), before, strict=True)]
        assert sorted(got) == [0, 3]
        homes.append(got.index(3))
    assert set(homes) == {0, 1}
    found = await samples(fleet.client)
    assert found[key("winnow_balanced_requests_total", choice="affine")] == 60
    assert found[key("winnow_balanced_requests_total", choice="load")] == 0


async def test_a_popular_prefix_goes_to_both(fleet: Fleet) -> None:
    body = {**conversation(1), "fake": {"hang": True}}
    waiting = [asyncio.create_task(fleet.client.post(CHAT, json=body)) for _ in range(40)]

    async def all_there() -> bool | None:
        return sum(fleet.asked()) == 40 or None

    await eventually(all_there)
    assert max(fleet.asked()) <= 1.25 * 20
    found = await samples(fleet.client)
    assert sum(found[key("winnow_runtime_requests_in_flight", runtime=fake.name)] for fake in fleet.fakes) == 40
    assert found[key("winnow_balanced_requests_total", choice="load")] > 0
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)

    async def none_there() -> bool | None:
        found = await samples(fleet.client)
        return (
            not any(found[key("winnow_runtime_requests_in_flight", runtime=fake.name)] for fake in fleet.fakes) or None
        )

    await eventually(none_there)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_runtime_that_is_gone_did_not_take_goes_to_the_other(fleet: Fleet, stream: bool) -> None:
    await fleet.fakes[0].stop()
    bodies = [{**conversation(number), "stream": stream} for number in range(30)]
    answers = await asyncio.gather(*(fleet.client.post(CHAT, json=body) for body in bodies))
    assert {answer.status_code for answer in answers} == {200}
    assert fleet.asked() == [0, 30]
    found = await samples(fleet.client)
    retries = found[key("winnow_runtime_retries_total")]
    assert 0 < retries == found[key("winnow_runtime_errors_total", kind="runtime_unavailable")]

    state = await fleet.until(ready=True, degraded=True)
    assert f"{fleet.fakes[0].name}: The runtime cannot be reached" in state["reason"]
    assert [runtime["usable"] for runtime in state["runtimes"]] == [False, True]
    assert (await fleet.client.post(CHAT, json=bodies[0])).status_code == 200
    assert (await samples(fleet.client))[key("winnow_runtime_retries_total")] <= retries + 1

    await fleet.fakes[0].start()
    await fleet.until(ready=True, degraded=False)
    await asyncio.gather(*(fleet.client.post(CHAT, json=body) for body in bodies))
    assert fleet.asked()[0] > 0


async def test_what_a_runtime_refuses_with_503_goes_to_the_other_once(fleet: Fleet) -> None:
    answer = await fleet.client.post(CHAT, json={**conversation(1), "fake": {"status": 503}})
    assert answer.status_code == 503
    assert answer.json() == {"error": {"message": "no"}}
    assert fleet.asked() == [1, 1]


@pytest.mark.parametrize("fake", [{"status": 500}, {"status": 429}, {"die": True}, {"die_after": 0}, {"hang": True}])
async def test_what_a_runtime_may_have_begun_is_not_sent_again(fleet: Fleet, fake: dict[str, Any]) -> None:
    body = {**conversation(1), "stream": "die_after" in fake, "fake": fake}
    with contextlib.suppress(httpx.ReadTimeout):
        await fleet.client.post(CHAT, json=body, timeout=1)
    assert sum(fleet.asked()) == 1


async def test_policies_are_checked_wherever_requests_go(fleet: Fleet) -> None:
    for number in range(10):
        body = {**conversation(number), "attention": {"decode": {"policy": "delta", "delta_layers": [99]}}}
        assert (await fleet.client.post(CHAT, json=body)).status_code == 422
    body = {**conversation(1), "attention": {"decode": {"policy": "quest"}}}
    assert (await fleet.client.post(CHAT, json=body)).status_code == 200
    validated = await fleet.client.post("/v1/policies:validate", json={"attention": body["attention"]})
    assert validated.json()["checked_against_model"] is True


async def test_a_runtime_with_another_model_gets_nothing(fleet: Fleet) -> None:
    await fleet.fakes[1].stop()
    await fleet.until(degraded=True)
    fleet.fakes[1].runtime.model = "another"
    await fleet.fakes[1].start()

    async def told() -> dict[str, Any] | None:
        state: dict[str, Any] = (await fleet.client.get("/readyz")).json()
        return state if "another" in state["reason"] else None

    state = await eventually(told)
    assert state["ready"]
    assert "serves the model another, and the first that told it needle" in state["reason"]
    assert [runtime["model"] for runtime in state["runtimes"]] == ["needle", "another"]
    for number in range(20):
        assert (await fleet.client.post(CHAT, json=conversation(number))).status_code == 200
    assert fleet.asked() == [20, 0]
    # No request goes to another model because the right one is away.
    await fleet.fakes[0].stop()
    assert (await fleet.client.post(CHAT, json=conversation(1))).status_code == 503
    assert fleet.asked() == [20, 0]
    await fleet.until(ready=False)


async def test_a_runtime_that_did_not_tell_its_model_is_asked_again(fleet: Fleet) -> None:
    await fleet.fakes[1].stop()
    await fleet.until(degraded=True)
    fleet.fakes[1].runtime.hides_model = True
    await fleet.fakes[1].start()

    async def unnamed() -> bool | None:
        reason: str = (await fleet.client.get("/readyz")).json()["reason"]
        return "does not tell its model" in reason or None

    await eventually(unnamed)
    fleet.fakes[1].runtime.hides_model = False
    await fleet.until(ready=True, degraded=False)


async def test_a_runtime_that_fails_is_left_alone_until_one_request_has_tried(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        fake = Fake()
        await fake.start()
        stack.push_async_callback(fake.stop)
        bounds: dict[str, Any] = {"breaker_failures": 3, "breaker_open_seconds": BREAKER_SECONDS}
        store = f"sqlite:///{tmp_path}/control.db"
        fleet = Fleet(await stack.enter_async_context(replica(store, f"http://{fake.name}", **bounds)), [fake])
        await fleet.until(ready=True)

        async def state(name: str) -> float:
            return (await samples(fleet.client))[key("winnow_runtime_breaker_state", runtime=fake.name, state=name)]

        for _ in range(3):
            assert await state("closed") == 1
            assert (await fleet.client.post("/generate", json={"fake": {"die": True}})).status_code == 502
        refused = await fleet.client.post("/generate", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "circuit_open")
        assert refused.headers["retry-after"] == "1"
        assert await state("open") == 1
        readiness = await fleet.until(ready=False)
        assert "failed several times in a row" in readiness["reason"]
        assert len(fake.runtime.asked) == 3

        await fleet.until(ready=True)
        assert await state("half_open") == 1
        trying = asyncio.create_task(fleet.client.post("/generate", json={"fake": {"hang": True}}))
        await eventually(lambda: asked(fake, 4))
        assert (await fleet.client.post("/generate", json={})).status_code == 503
        # A client that leaves tells nothing of the runtime: the next one tries.
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        await asyncio.wait_for(fake.runtime.aborted.wait(), 5)

        async def served() -> bool | None:
            return (await fleet.client.post("/generate", json={})).status_code == 200 or None

        await eventually(served)
        assert await state("closed") == 1
        refusals = (await samples(fleet.client))[key("winnow_refusals_total", code="circuit_open")]
        assert refusals >= 2


async def asked(fake: Fake, number: int) -> bool | None:
    return len(fake.runtime.asked) == number or None


@pytest.mark.parametrize(
    ("urls", "says"),
    [
        ("", "valid URL"),
        ("http://a:1,", "valid URL"),
        ("http://a:1, http://a:1/", "each runtime once"),
        ("http://user:secret@a:1", "WINNOW_RUNTIME_API_KEY"),
        ("http://a:1/base?x=1", "nothing behind the path"),
        ("ftp://a", "http"),
    ],
)
def test_addresses_that_are_none_are_refused(urls: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINNOW_RUNTIME_URLS", urls)
    with pytest.raises(ValidationError, match=says) as refused:
        Settings()
    assert "secret" not in str(refused.value)


def test_addresses_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINNOW_RUNTIME_URLS", "http://a:1, https://b/base")
    assert [str(url) for url in Settings().runtime_urls] == ["http://a:1/", "https://b/base"]
