"""Runtimes behind one name of the DNS: they come and go, and the DNS does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import AnyUrl, ValidationError

from tests.ports import free_port
from tests.service.control import replica
from tests.service.fake_runtime import FakeRuntime
from tests.service.servers import serving
from tests.service.test_attention import SERVED
from tests.service.test_forwarding import key, samples
from tests.service.test_runtimes import CHAT, conversation
from tests.service.waiting import eventually
from winnow_service.metrics.instruments import Metrics
from winnow_service.runtime.discovery import Discovery, resolve
from winnow_service.settings import Settings

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
INTERVAL_SECONDS = 0.05
AWAY = OSError(-3, "Temporary failure in name resolution")


@dataclass
class Dns:
    """A stand-in for the DNS, which knows one name.

    Attributes:
        answer: its addresses, or why there is no answer.
        asked: for which names.
    """

    answer: Sequence[str] | OSError
    asked: list[tuple[str, int]] = field(default_factory=list)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer


@dataclass(frozen=True)
class Cloud:
    """A service in front of whatever the DNS has, and two runtimes on one port of two addresses."""

    client: httpx.AsyncClient
    dns: Dns
    runtimes: dict[str, FakeRuntime]
    port: int

    def name(self, address: str) -> str:
        return f"{address}:{self.port}"

    def asked(self) -> list[int]:
        return [len(runtime.asked) for runtime in self.runtimes.values()]

    async def state(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.client.get("/readyz")).json()
        return found

    async def until_usable(self, *addresses: str) -> dict[str, Any]:
        """Wait until these get requests, and no others are known."""

        async def look() -> dict[str, Any] | None:
            state = await self.state()
            known = [(runtime["name"], runtime["usable"]) for runtime in state["runtimes"]]
            return state if known == [(self.name(each), True) for each in addresses] else None

        return await eventually(look)

    async def generate(self, number: int = 1, **fake: Any) -> httpx.Response:
        return await self.client.post(CHAT, json={**conversation(number), "fake": fake})

    async def in_flight(self, address: str) -> float | None:
        return (await samples(self.client)).get(key("winnow_runtime_requests_in_flight", runtime=self.name(address)))


@contextlib.asynccontextmanager
async def clouded(tmp_path: Path, answer: Sequence[str] | OSError, **settings: Any) -> AsyncIterator[Cloud]:
    port = free_port()
    runtimes = {FIRST: FakeRuntime(), SECOND: FakeRuntime()}
    dns = Dns(answer)
    async with contextlib.AsyncExitStack() as stack:
        for address, runtime in runtimes.items():
            runtime.server_info = {"winnow": SERVED}
            await stack.enter_async_context(serving(runtime.app(), port, grace_seconds=1, host=address))
        service = replica(
            f"sqlite:///{tmp_path}/control.db",
            f"dns+http://runtimes.example:{port}",
            resolve=dns,
            runtime_dns_interval_seconds=INTERVAL_SECONDS,
            **settings,
        )
        yield Cloud(await stack.enter_async_context(service), dns, runtimes, port)


@pytest_asyncio.fixture
async def cloud(tmp_path: Path) -> AsyncIterator[Cloud]:
    """Both are known."""
    async with clouded(tmp_path, [SECOND, FIRST]) as cloud:
        await cloud.until_usable(FIRST, SECOND)
        yield cloud


async def test_a_name_stands_for_all_its_addresses(cloud: Cloud) -> None:
    answers = await asyncio.gather(*(cloud.generate(number) for number in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert min(cloud.asked()) > 0
    assert sum(cloud.asked()) == 20
    assert set(cloud.dns.asked) == {("runtimes.example", cloud.port)}
    state = await cloud.state()
    assert (state["ready"], state["degraded"]) == (True, False)
    name = cloud.name("runtimes.example")
    assert state["names"] == [{"name": name, "resolved": True, "addresses": 2, "reason": "It was looked up."}]
    found = await samples(cloud.client)
    assert found[key("winnow_runtime_addresses", dns_name=name)] == 2
    assert found[key("winnow_runtime_dns_resolved", dns_name=name)] == 1
    assert found[key("winnow_runtime_dns_failures_total", dns_name=name)] == 0
    assert found[key("winnow_runtime_ready", runtime=cloud.name(SECOND))] == 1


async def test_a_new_address_gets_requests(tmp_path: Path) -> None:
    async with clouded(tmp_path, [SECOND]) as cloud:
        await cloud.until_usable(SECOND)
        await asyncio.gather(*(cloud.generate(number) for number in range(20)))
        assert cloud.asked() == [0, 20]
        # The DNS has its own order. Those known longest stay first, so that the model they serve stays the one.
        cloud.dns.answer = [FIRST, SECOND]
        await cloud.until_usable(SECOND, FIRST)
        await asyncio.gather(*(cloud.generate(number) for number in range(20)))
        assert min(cloud.asked()[0], cloud.asked()[1] - 20) > 0


async def test_one_that_vanishes_gets_nothing_new_and_its_streams_end(tmp_path: Path) -> None:
    # One at once for each that there is: what leaves must not take the place of others.
    async with clouded(tmp_path, [FIRST], max_running=1, max_queued=0) as cloud:
        await cloud.until_usable(FIRST)
        leaving = cloud.runtimes[FIRST]
        body = {**conversation(1), "stream": True, "fake": {"gated": True, "chunks": 3}}
        async with cloud.client.stream("POST", CHAT, json=body) as stream:
            lines = stream.aiter_lines()
            leaving.gate.release()
            assert (await anext(lines)).startswith("data: ")
            cloud.dns.answer = [SECOND]
            await cloud.until_usable(SECOND)
            for number in range(5):
                assert (await cloud.generate(number)).status_code == 200
            assert cloud.asked() == [1, 5]
            found = await samples(cloud.client)
            gone = cloud.name(FIRST)
            assert found[key("winnow_runtime_requests_in_flight", runtime=gone)] == 1
            assert key("winnow_runtime_ready", runtime=gone) not in found
            assert key("winnow_runtime_breaker_state", runtime=gone, state="closed") not in found
            for _ in range(2):
                leaving.gate.release()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert leaving.events_sent == 3

        async def forgotten() -> bool | None:
            return await cloud.in_flight(FIRST) is None or None

        await eventually(forgotten)


async def test_one_that_is_back_before_its_last_stream_has_ended_is_the_same(cloud: Cloud) -> None:
    hanging = asyncio.create_task(cloud.generate(hang=True))

    async def begun() -> str | None:
        return next((each for each, runtime in cloud.runtimes.items() if runtime.asked), None)

    home = await eventually(begun)
    [other] = {FIRST, SECOND} - {home}
    body = {**conversation(1), "attention": {"decode": {"policy": "quest"}}}
    for _ in range(2):
        assert (await cloud.client.post(CHAT, json=body)).status_code == 200
    assert len(cloud.runtimes[home].server_info_asked) == 1
    cloud.dns.answer = [other]
    await cloud.until_usable(other)
    assert await cloud.in_flight(home) == 1
    cloud.dns.answer = [FIRST, SECOND]
    await cloud.until_usable(other, home)
    assert await cloud.in_flight(home) == 1
    # What it told may no longer hold.
    assert (await cloud.client.post(CHAT, json=body)).status_code == 200
    assert len(cloud.runtimes[home].server_info_asked) == 2
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)

    async def ended() -> bool | None:
        return await cloud.in_flight(home) == 0 or None

    await eventually(ended)


@pytest.mark.parametrize("answer", [AWAY, ()])
async def test_without_an_answer_the_last_known_addresses_serve(cloud: Cloud, answer: Sequence[str] | OSError) -> None:
    cloud.dns.answer = answer

    async def degraded() -> dict[str, Any] | None:
        state = await cloud.state()
        return state if state["degraded"] else None

    state = await eventually(degraded)
    why = "it has no addresses" if answer == () else "Temporary failure in name resolution"
    name = cloud.name("runtimes.example")
    assert state["ready"] is True
    assert state["reason"] == f"{name}: It could not be looked up: {why}."
    assert [(each["resolved"], each["addresses"]) for each in state["names"]] == [(False, 2)]
    answers = await asyncio.gather(*(cloud.generate(number) for number in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert min(cloud.asked()) > 0
    found = await samples(cloud.client)
    assert found[key("winnow_runtime_addresses", dns_name=name)] == 2
    assert found[key("winnow_runtime_dns_resolved", dns_name=name)] == 0
    assert found[key("winnow_runtime_dns_failures_total", dns_name=name)] > 0

    cloud.dns.answer = [FIRST]
    state = await cloud.until_usable(FIRST)
    assert (state["ready"], state["degraded"]) == (True, False)


async def test_a_name_that_was_never_found_is_not_ready_until_it_is(tmp_path: Path) -> None:
    async with clouded(tmp_path, AWAY) as cloud:

        async def told() -> dict[str, Any] | None:
            state = await cloud.state()
            return state if "Temporary failure" in state["reason"] else None

        state = await eventually(told)
        assert (state["ready"], state["degraded"], state["runtimes"]) == (False, False, [])
        refused = await cloud.generate()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "runtime_unavailable")
        assert refused.headers["retry-after"]
        assert (await cloud.client.get("/v1/models")).status_code == 503
        question = {"attention": {"decode": {"policy": "quest"}}}
        validated = await cloud.client.post("/v1/policies:validate", json=question)
        assert validated.json()["checked_against_model"] is False
        assert (await cloud.client.post(CHAT, json={**conversation(1), **question})).status_code == 503

        cloud.dns.answer = [FIRST, SECOND]
        await cloud.until_usable(FIRST, SECOND)
        assert (await cloud.generate()).status_code == 200


async def test_each_address_has_a_breaker_of_its_own(tmp_path: Path) -> None:
    async with clouded(tmp_path, [FIRST, SECOND], breaker_failures=2, breaker_open_seconds=600) as cloud:
        await cloud.until_usable(FIRST, SECOND)
        for _ in range(2):
            assert (await cloud.generate(die=True)).status_code == 502
        broken, other = (FIRST, SECOND) if cloud.asked() == [2, 0] else (SECOND, FIRST)

        async def breaker(address: str) -> str:
            found = await samples(cloud.client)
            states = ("closed", "open", "half_open")
            name = cloud.name(address)
            [state] = [each for each in states if found[key("winnow_runtime_breaker_state", runtime=name, state=each)]]
            return state

        assert (await breaker(broken), await breaker(other)) == ("open", "closed")
        assert (await cloud.generate()).status_code == 200
        assert len(cloud.runtimes[other].asked) == 1
        # What left and is back may be another: nothing bad is known of it.
        cloud.dns.answer = [other]
        await cloud.until_usable(other)
        cloud.dns.answer = [FIRST, SECOND]
        await cloud.until_usable(other, broken)
        assert await breaker(broken) == "closed"
        assert (await cloud.generate()).status_code == 200
        assert len(cloud.runtimes[broken].asked) == 3


async def test_another_model_waits_until_the_last_of_the_old_is_gone(tmp_path: Path) -> None:
    async with clouded(tmp_path, [SECOND]) as cloud:
        await cloud.until_usable(SECOND)
        cloud.runtimes[FIRST].model = "another"
        cloud.dns.answer = [FIRST, SECOND]

        async def told() -> bool | None:
            return "another" in (await cloud.state())["reason"] or None

        await eventually(told)
        for number in range(10):
            await cloud.generate(number)
        assert cloud.asked() == [0, 10]
        cloud.dns.answer = [FIRST]
        state = await cloud.until_usable(FIRST)
        assert [runtime["model"] for runtime in state["runtimes"]] == ["another"]
        assert (await cloud.generate()).status_code == 200
        assert cloud.asked() == [1, 10]


async def test_listed_addresses_and_names_stand_together_each_runtime_once(tmp_path: Path) -> None:
    port = free_port()
    dns = Dns([FIRST, SECOND])
    urls = f"http://{SECOND}:{port},dns+http://a.example:{port}/base,dns+http://b.example:{port}"
    store = f"sqlite:///{tmp_path}/control.db"
    async with replica(store, urls, resolve=dns, runtime_dns_interval_seconds=INTERVAL_SECONDS) as client:

        async def known() -> dict[str, Any] | None:
            state: dict[str, Any] = (await client.get("/readyz")).json()
            return state if all(each["resolved"] for each in state["names"]) else None

        state = await eventually(known)
        assert [runtime["name"] for runtime in state["runtimes"]] == [f"{SECOND}:{port}", f"{FIRST}:{port}"]
        # What is listed by its address does not go when a name does not have it any more.
        dns.answer = [FIRST]

        async def still() -> dict[str, Any] | None:
            state: dict[str, Any] = (await client.get("/readyz")).json()
            return state if {each["addresses"] for each in state["names"]} == {1} else None

        assert [each["name"] for each in (await eventually(still))["runtimes"]] == [
            f"{SECOND}:{port}",
            f"{FIRST}:{port}",
        ]


async def test_addresses_become_urls() -> None:
    dns = Dns(["fd00::2", "10.0.0.7"])
    discovery = Discovery(AnyUrl("dns+http://a.example:30000/base"), Metrics(), dns)
    assert (discovery.urls, discovery.state.resolved) == ((), False)
    await discovery.refresh()
    assert [str(url) for url in discovery.urls] == ["http://10.0.0.7:30000/base", "http://[fd00::2]:30000/base"]
    discovery = Discovery(AnyUrl("dns+http://a.example"), Metrics(), dns)
    await discovery.refresh()
    assert dns.asked[-1] == ("a.example", 80)


async def test_the_machine_s_own_resolver() -> None:
    # As a machine that has both versions: once.
    assert await resolve("localhost", 30000) == ["127.0.0.1"]
    for nonsense in ("name.invalid", "a" * 64 + ".example"):
        with pytest.raises(OSError, match=r"."):
            await resolve(nonsense, 30000)


@pytest.mark.parametrize(
    ("url", "says"), [("dns+https://a:1", "'dns\\+http'"), ("dns+http://", "host"), ("dns+http:a", "host")]
)
def test_names_that_are_none_are_refused(url: str, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Settings.model_validate({"runtime_urls": url})
