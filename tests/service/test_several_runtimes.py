"""Two runtimes behind HAProxy, with the configuration that ships, behind the service."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import SecretStr

from tests.ports import free_port
from tests.service.control import ADMIN_KEY, bearer, make_key, processes, replica
from tests.service.fake_runtime import FakeRuntime
from tests.service.haproxy import Balancer, haproxy
from tests.service.runtime_process import runtime_process
from tests.service.servers import serving
from tests.service.test_attention import SERVED, STATISTICS
from tests.service.test_faults import until_ready
from tests.service.test_forwarding import key, samples
from tests.service.test_streaming import events
from tests.service.waiting import eventually

CHAT = "/v1/chat/completions"
ADMIN = bearer(ADMIN_KEY)


class Fake:
    """A runtime on a port of its own, which can be started and stopped."""

    def __init__(self) -> None:
        self.runtime = FakeRuntime()
        self.runtime.server_info = {"winnow": SERVED}
        self.port = free_port()
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        await self._stack.enter_async_context(serving(self.runtime.app(), self.port, grace_seconds=1))

    async def stop(self) -> None:
        await self._stack.aclose()


@dataclass(frozen=True)
class Fleet:
    """A service in front of HAProxy in front of two runtimes."""

    client: httpx.AsyncClient
    balancer: Balancer
    fakes: list[Fake]

    def asked(self) -> list[int]:
        return [len(fake.runtime.asked) for fake in self.fakes]

    async def home(self, body: dict[str, Any]) -> int:
        """The number of the runtime that requests like ``body`` go to."""
        before = self.asked()
        assert (await self.client.post(CHAT, json=body)).status_code == 200
        return [now - then for now, then in zip(self.asked(), before, strict=True)].index(1)

    async def until_asked(self, number: int) -> None:
        async def look() -> bool | None:
            return sum(self.asked()) == number or None

        await eventually(look)


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """Two runtimes that run."""
    async with contextlib.AsyncExitStack() as stack:
        fakes = [Fake(), Fake()]
        for fake in fakes:
            await fake.start()
            stack.push_async_callback(fake.stop)
        balancer = await stack.enter_async_context(haproxy(tmp_path, [fake.port for fake in fakes]))
        await balancer.until_up(2)
        store = f"sqlite:///{tmp_path}/control.db"
        service = replica(store, balancer.address, admin_key=SecretStr(ADMIN_KEY))
        client = await stack.enter_async_context(service)

        async def ready() -> bool | None:
            return (await client.get("/readyz")).status_code == 200 or None

        await eventually(ready)
        client.headers.update(ADMIN)
        yield Fleet(client, balancer, fakes)


def conversation(number: int, *more: str, **fields: Any) -> dict[str, Any]:
    contents = ["Be brief.", f"Conversation {number}", *more]
    messages = [{"role": "user" if index else "system", "content": text} for index, text in enumerate(contents)]
    return {"messages": messages, **fields}


async def test_a_conversation_stays_with_its_runtime_and_others_spread(fleet: Fleet) -> None:
    homes = []
    for number in range(20):
        of_turns = {await fleet.home(conversation(number, *["More"] * turn)) for turn in range(3)}
        assert len(of_turns) == 1
        homes.append(of_turns.pop())
    assert 4 <= sum(homes) <= 16


async def test_where_a_request_goes_is_not_the_clients_choice(fleet: Fleet) -> None:
    for number in range(8):
        answer = await fleet.client.post(CHAT, json=conversation(1), headers={"x-winnow-prefix": str(number)})
        assert answer.status_code == 200
    assert sorted(fleet.asked()) == [0, 8]
    [sent] = {each.headers["x-winnow-prefix"] for fake in fleet.fakes for each in fake.runtime.asked}
    assert len(sent) == 16


async def test_what_has_no_prompt_goes_round(fleet: Fleet) -> None:
    for _ in range(8):
        assert (await fleet.client.get("/v1/models")).status_code == 200
    assert min(fleet.asked()) > 0


async def test_a_popular_prefix_goes_to_both(fleet: Fleet) -> None:
    body = conversation(1, fake={"hang": True})
    waiting = [asyncio.create_task(fleet.client.post(CHAT, json=body)) for _ in range(40)]
    await fleet.until_asked(40)
    assert max(fleet.asked()) <= 1.25 * 20 + 1
    in_flight = key("winnow_runtime_requests_in_flight", runtime=fleet.balancer.name)
    assert (await samples(fleet.client))[in_flight] == 40
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)

    async def none_there() -> bool | None:
        running = any(fake.runtime.concurrent for fake in fleet.fakes)
        return (not running and (await samples(fleet.client))[in_flight] == 0) or None

    await eventually(none_there)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_runtime_that_is_gone_did_not_take_goes_to_the_other(fleet: Fleet, stream: bool) -> None:
    await fleet.fakes[0].stop()
    bodies = [conversation(number, stream=stream) for number in range(30)]
    answers = await asyncio.gather(*(fleet.client.post(CHAT, json=body) for body in bodies))
    assert {answer.status_code for answer in answers} == {200}
    assert fleet.asked() == [0, 30]
    await fleet.balancer.until_up(1)
    state = (await fleet.client.get("/readyz")).json()
    assert (state["ready"], state["degraded"]) == (True, False)

    await fleet.fakes[0].start()
    await fleet.balancer.until_up(2)
    await asyncio.gather(*(fleet.client.post(CHAT, json=body) for body in bodies))
    assert fleet.asked()[0] > 0


async def test_without_any_runtime_the_service_is_not_ready_and_says_so(fleet: Fleet) -> None:
    for fake in fleet.fakes:
        await fake.stop()
    await fleet.balancer.until_up(0)

    async def refused() -> dict[str, Any] | None:
        state: dict[str, Any] = (await fleet.client.get("/readyz")).json()
        return None if state["ready"] else state

    assert "status 503" in (await eventually(refused))["reason"]
    answer = await fleet.client.post(CHAT, json=conversation(1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "runtime_unavailable")


async def test_what_a_runtime_refuses_with_503_goes_to_the_other_once(fleet: Fleet) -> None:
    answer = await fleet.client.post(CHAT, json=conversation(1, fake={"status": 503}))
    assert answer.status_code == 503
    assert answer.json() == {"error": {"message": "no"}}
    assert fleet.asked() == [1, 1]


@pytest.mark.parametrize("fake", [{"status": 500}, {"status": 429}, {"die": True}, {"die_after": 0}, {"hang": True}])
async def test_what_a_runtime_may_have_begun_is_not_sent_again(fleet: Fleet, fake: dict[str, Any]) -> None:
    body = conversation(1, stream="die_after" in fake, fake=fake)
    with contextlib.suppress(httpx.ReadTimeout):
        await fleet.client.post(CHAT, json=body, timeout=1)
    assert sum(fleet.asked()) == 1


async def test_policies_are_checked_and_reach_the_runtime_with_every_other_field(fleet: Fleet) -> None:
    fields = {"rid": "a", "cache_salt": "tenant", "extra_key": "b", "custom_params": {"mine": 1}, "later": [None, 0.10]}
    for number in range(6):
        refused = conversation(number, attention={"decode": {"policy": "delta", "delta_layers": [99]}})
        assert (await fleet.client.post(CHAT, json=refused)).status_code == 422
    assert fleet.asked() == [0, 0]
    body = conversation(1, attention={"decode": {"policy": "quest", "budget": 1024}}, **fields)
    assert (await fleet.client.post(CHAT, json=body)).status_code == 200
    [asked] = [each for fake in fleet.fakes for each in fake.runtime.asked]
    got = json.loads(asked.body)
    assert got["custom_params"].pop("attention")
    assert {name: got[name] for name in fields} == fields
    # Without a policy, the very bytes.
    content = b'{ "text" : "caf\xc3\xa9",\n "cache_salt":"t", "temperature":0.10 }'
    headers = {"content-type": "application/json", "x-mine": "yes"}
    assert (await fleet.client.post("/generate?a=1&b=%20", content=content, headers=headers)).status_code == 200
    plain = next(each for fake in fleet.fakes for each in fake.runtime.asked if each.path == "/generate")
    assert (plain.body, plain.query, plain.headers["x-mine"]) == (content, "a=1&b=%20", "yes")


async def test_long_prompts_and_long_heads_pass(fleet: Fleet) -> None:
    body = conversation(1, "x" * 1_000_000)
    answer = await fleet.client.post(CHAT, json=body, headers={"x-long": "y" * 60_000})
    assert answer.status_code == 200
    [asked] = [each for fake in fleet.fakes for each in fake.runtime.asked]
    assert json.loads(asked.body) == body
    assert len(asked.headers["x-long"]) == 60_000


@pytest.mark.parametrize("stream", [False, True])
async def test_statistics_reach_the_client_and_the_metrics(fleet: Fleet, stream: bool) -> None:
    facts = {"text": "a", "meta_info": {"prompt_tokens": 7, "completion_tokens": 4, "attention": STATISTICS}}
    body = {"text": "a", "stream": stream, "fake": {"events": [facts]} if stream else {"answer": facts}}
    answer = await fleet.client.post("/generate", json=body)
    first = events(answer.text)[0] if stream else answer.json()
    assert first["attention"] == STATISTICS

    async def counted() -> bool | None:
        found = await samples(fleet.client)
        labels = {"decode_policy": "default", "model": "needle"}
        return found.get(key("winnow_output_tokens_total", **labels)) == 4 or None

    await eventually(counted)


async def test_each_token_comes_when_the_runtime_has_it(fleet: Fleet) -> None:
    body = {"text": "a", "stream": True, "fake": {"chunks": 4, "gated": True}}
    async with asyncio.timeout(10), fleet.client.stream("POST", "/generate", json=body) as answer:
        [gate] = [fake.runtime.gate for fake in fleet.fakes if fake.runtime.asked]
        text = answer.aiter_text()
        for index in range(3):
            gate.release()
            assert json.loads((await anext(text)).removeprefix("data: "))["index"] == index
        gate.release()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_request_and_no_other(fleet: Fleet, stream: bool) -> None:
    homes = {await fleet.home(conversation(number)): number for number in range(20)}
    fake = {"chunks": 10_000, "pause": 0.01} if stream else {"hang": True}
    # One for each runtime.
    calls = {
        home: asyncio.create_task(fleet.client.post(CHAT, json=conversation(number, stream=stream, fake=fake)))
        for home, number in homes.items()
    }
    await fleet.until_asked(22)
    first, second = (fleet.fakes[home].runtime.aborted for home in (0, 1))
    calls[0].cancel()
    await asyncio.wait_for(first.wait(), 5)
    assert not second.is_set()
    calls[1].cancel()
    await asyncio.wait_for(second.wait(), 5)
    await asyncio.gather(*calls.values(), return_exceptions=True)


async def test_limits_hold(fleet: Fleet) -> None:
    made = await make_key(fleet.client, limits={"requests_per_minute": 3})
    answers = [
        await fleet.client.post(CHAT, json=conversation(number), headers=bearer(made["key"])) for number in range(5)
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert sum(fleet.asked()) == 3
    found = await samples(fleet.client)
    assert found[key("winnow_limits_hit_total", limit="requests")] == 2


async def test_a_runtime_that_is_killed_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINNOW_METRICS_PUBLIC", "true")
    async with contextlib.AsyncExitStack() as stack:
        runtimes = [await stack.enter_async_context(runtime_process()) for _ in range(2)]
        balancer = await stack.enter_async_context(haproxy(tmp_path, [runtime.port for runtime in runtimes]))
        await balancer.until_up(2)
        store = f"sqlite:///{tmp_path}/control.db"
        [service] = await stack.enter_async_context(processes(store, tmp_path, balancer.address, number=1))
        await until_ready(service, True)

        begun = []

        async def stream(number: int, **fake: Any) -> Any:
            body = conversation(number, stream=True, fake=fake)
            chunks: list[str] = []
            async with service.client.stream("POST", CHAT, json=body, headers=ADMIN) as answer:
                assert answer.status_code == 200
                async for chunk in answer.aiter_text():
                    if not chunks:
                        begun.append(number)
                    chunks.append(chunk)
            return events("".join(chunks))[-1]

        async def all_begun() -> bool | None:
            return len(begun) == 20 or None

        running = [asyncio.create_task(stream(number, chunks=200, pause=0.02)) for number in range(20)]
        await eventually(all_begun)
        await runtimes[0].kill()
        after = await asyncio.gather(*(stream(number) for number in range(20, 40)))
        assert after == ["[DONE]"] * 20
        ends = await asyncio.gather(*running)
        broken = [end for end in ends if end != "[DONE]"]
        # Those of the other runtime go on to their end.
        assert 0 < len(broken) < 20
        assert {end["error"]["code"] for end in broken} == {"runtime_died"}
        await balancer.until_up(1)
        assert await balancer.counted("haproxy_backend_redispatch_warnings_total", proxy="runtimes") > 0
        found = await samples(service.client)
        assert found[key("winnow_runtime_errors_total", kind="runtime_died")] == len(broken)
        # The upstream as a whole goes on being asked.
        assert found[key("winnow_runtime_breaker_state", runtime=balancer.name, state="closed")] == 1
        assert (await service.client.get("/readyz")).json()["ready"] is True

        await runtimes[0].start()
        await balancer.until_up(2)
        assert await asyncio.gather(*(stream(number) for number in range(20))) == ["[DONE]"] * 20
