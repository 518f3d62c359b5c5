"""Limits of keys: what is admitted, what is counted, and what clients are told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.control import ADMIN_KEY, bearer, known, make_key, processes, replica, runtime
from tests.service.redis_servers import RedisServer, redis_server
from tests.service.test_policies_api import problem
from tests.service.waiting import eventually
from winnow_service.errors import RateLimited
from winnow_service.limits import redis as redis_limits
from winnow_service.limits.limiter import Limiter, Limits, Reservation
from winnow_service.limits.memory import MemoryLimiter
from winnow_service.limits.redis import RedisLimiter
from winnow_service.proxy.answer import AnswerReader
from winnow_service.proxy.body import Form
from winnow_service.proxy.charge import Charge
from winnow_service.proxy.estimate import estimate, has_several_answers
from winnow_service.store.open import parse_store_url
from winnow_service.store.redis_connection import RedisAddress, RedisConnection

KEY = "0" * 16


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def redis_limiter(server: RedisServer) -> AsyncIterator[RedisLimiter]:
    address = parse_store_url(server.url)
    assert isinstance(address, RedisAddress)
    connection = RedisConnection(address, "test")
    try:
        yield RedisLimiter(connection)
    finally:
        await connection.close()


@pytest_asyncio.fixture(params=["memory", "redis"])
async def limiter(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Limiter]:
    if request.param == "memory":
        yield MemoryLimiter()
        return
    async with redis_server(tmp_path) as server, redis_limiter(server) as counting:
        yield counting


async def admitted(limiter: Limiter, limits: Limits, tokens: int = 0, key_id: str = KEY) -> Reservation | None:
    try:
        return await limiter.admit(key_id, limits, tokens)
    except RateLimited:
        return None


async def test_requests_are_counted_by_key(limiter: Limiter) -> None:
    limits = Limits(requests_per_minute=3)
    assert [await admitted(limiter, limits) is not None for _ in range(5)] == [True] * 3 + [False] * 2
    assert await admitted(limiter, limits, key_id="1" * 16) is not None
    assert await admitted(limiter, Limits()) is not None
    with pytest.raises(RateLimited, match="3 requests per minute") as caught:
        await limiter.admit(KEY, limits, 0)
    headers = caught.value.headers
    assert 59 <= int(headers["retry-after"]) <= 61
    assert headers["ratelimit-policy"] == '"requests";q=3;w=60'
    assert headers["ratelimit"].startswith('"requests";r=0;t=6')
    assert caught.value.members == {"violated-policies": ["requests"]}


async def test_tokens_are_reserved_and_corrected(limiter: Limiter) -> None:
    limits = Limits(tokens_per_minute=100)
    first = await admitted(limiter, limits, 60)
    assert first is not None
    assert first.headers == {"ratelimit-policy": '"tokens";q=100;w=60', "ratelimit": '"tokens";r=40;t=60'}
    assert await admitted(limiter, limits, 41) is None
    await limiter.settle(first, 10)
    second = await admitted(limiter, limits, 90)
    assert second is not None
    await limiter.settle(second, 200)
    assert await admitted(limiter, limits, 1) is None
    await limiter.settle(second, 90)


async def test_concurrent_requests_are_counted_until_they_end(limiter: Limiter) -> None:
    limits = Limits(concurrent_requests=2)
    one, two = await admitted(limiter, limits), await admitted(limiter, limits)
    assert one is not None
    assert two is not None
    assert two.headers["ratelimit-policy"] == '"concurrent";q=2;qu="concurrent-requests"'
    assert two.headers["ratelimit"] == '"concurrent";r=0'
    with pytest.raises(RateLimited, match="2 requests at once") as caught:
        await limiter.admit(KEY, limits, 0)
    assert caught.value.headers["retry-after"] == "1"
    await limiter.settle(one, 0)
    assert await admitted(limiter, limits) is not None
    assert await admitted(limiter, limits) is None


async def test_a_refused_request_counts_for_no_limit(limiter: Limiter) -> None:
    limits = Limits(requests_per_minute=2, tokens_per_minute=10, concurrent_requests=5)
    for _ in range(5):
        assert await admitted(limiter, limits, 11) is None
    assert await admitted(limiter, limits, 10) is not None
    with pytest.raises(RateLimited) as caught:
        await limiter.admit(KEY, limits, 1)
    assert caught.value.members["violated-policies"] == ["tokens"]
    assert await admitted(limiter, limits, 0) is not None
    with pytest.raises(RateLimited) as caught:
        await limiter.admit(KEY, limits, 1)
    assert caught.value.members["violated-policies"] == ["requests", "tokens"]


async def test_many_at_once_are_counted_exactly(limiter: Limiter) -> None:
    limits = Limits(requests_per_minute=50, concurrent_requests=40)
    tickets = await asyncio.gather(*(admitted(limiter, limits) for _ in range(100)))
    held = [ticket for ticket in tickets if ticket is not None]
    assert len(held) == 40
    await asyncio.gather(*(limiter.settle(ticket, 0) for ticket in held))
    assert sum(ticket is not None for ticket in [await admitted(limiter, limits) for _ in range(20)]) == 10


# Time.


@settings(max_examples=60)
@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 12)), min_size=1, max_size=60),
)
async def test_no_minute_holds_more_than_the_limit(limit: int, arrivals: list[tuple[float, int]]) -> None:
    clock = Clock()
    counting = MemoryLimiter(clock)
    times: list[tuple[float, int]] = []
    waits: list[int] = []
    for pause, tokens in arrivals:
        clock.now += pause
        try:
            await counting.admit(KEY, Limits(tokens_per_minute=limit), tokens)
        except RateLimited as refused:
            waits.append(int(refused.headers["retry-after"]))
        else:
            times.append((clock.now, tokens))
    assert all(1 <= wait <= 61 for wait in waits)
    for start, _ in times:
        assert sum(tokens for at, tokens in times if start <= at < start + 60) <= limit


async def test_a_steady_stream_gets_its_limit() -> None:
    clock = Clock()
    counting = MemoryLimiter(clock)
    limits = Limits(requests_per_minute=600)
    served = 0
    for _ in range(20 * 600):
        clock.now += 0.05
        served += await admitted(counting, limits) is not None
    assert 0.99 * 6000 <= served <= 6600


async def test_the_time_to_wait_is_right() -> None:
    clock = Clock()
    counting = MemoryLimiter(clock)
    limits = Limits(requests_per_minute=2)
    for pause in (0.0, 20.0):
        clock.now += pause
        await counting.admit(KEY, limits, 0)
    clock.now += 15
    with pytest.raises(RateLimited) as caught:
        await counting.admit(KEY, limits, 0)
    wait = int(caught.value.headers["retry-after"])
    assert wait == 26
    clock.now += wait - 1
    assert await admitted(counting, limits) is None
    clock.now += 1
    assert await admitted(counting, limits) is not None


async def test_a_correction_that_comes_late_does_not_give_what_is_free_already() -> None:
    clock = Clock()
    counting = MemoryLimiter(clock)
    limits = Limits(tokens_per_minute=100)
    long = await counting.admit(KEY, limits, 90)
    longer = await counting.admit(KEY, limits, 10)
    clock.now += 70
    await counting.settle(long, 0)
    assert await admitted(counting, limits, 101) is None
    await counting.settle(longer, 70)
    assert await admitted(counting, limits, 41) is None
    assert await admitted(counting, limits, 40) is not None


async def test_redis_forgets_what_is_older_than_a_minute_or_later_than_now(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, redis_limiter(server) as counting, server.client() as client:
        limits = Limits(requests_per_minute=10)
        now = int(time.time() * 2)
        key = f"{{test}}:limit:requests:{KEY}"
        await client.hset(key, mapping={str(now - 125): 7, str(now + 1000): 7, str(now - 100): 8})
        assert [await admitted(counting, limits) is not None for _ in range(3)] == [True, True, False]
        with pytest.raises(RateLimited) as caught:
            await counting.admit(KEY, limits, 0)
        assert 9 <= int(caught.value.headers["retry-after"]) <= 12
        assert len(await client.hkeys(key)) <= 3
        assert 55 <= await client.ttl(key) <= 62


async def test_what_a_killed_replica_held_is_free_after_its_lease(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, redis_limiter(server) as counting, server.client() as client:
        limits = Limits(concurrent_requests=1)
        held = await counting.admit(KEY, limits, 0)
        key = f"{{test}}:limit:concurrent:{KEY}"
        assert 25 <= await client.ttl(key) <= 30
        await client.zadd(key, {held.lease: 1})
        assert await admitted(counting, limits) is not None


async def test_what_a_request_holds_is_renewed_while_it_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_limits, "_RENEWED_EVERY_SECONDS", 0.05)
    async with redis_server(tmp_path) as server, redis_limiter(server) as counting, server.client() as client:
        held = await counting.admit(KEY, Limits(concurrent_requests=1), 0)
        ended = await counting.admit("1" * 16, Limits(concurrent_requests=1), 0)
        await counting.settle(ended, 0)
        key = f"{{test}}:limit:concurrent:{KEY}"
        first = await client.zscore(key, held.lease)
        renewing = asyncio.create_task(counting.run())

        async def renewed() -> bool | None:
            last = await client.zscore(key, held.lease)
            return (first is not None and last is not None and last > first) or None

        try:
            await eventually(renewed)
            assert await client.exists(f"{{test}}:limit:concurrent:{'1' * 16}") == 0
            # Redis goes and comes back: the renewal goes on.
            await server.kill()
            await asyncio.sleep(0.1)
            await server.start()
            await client.zadd(key, {held.lease: 1})
            first = 1
            await eventually(renewed)
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)


# Usage.


@pytest.mark.parametrize(
    ("form", "body", "prompt", "answers"),
    [
        (Form.NATIVE, {"text": "x" * 40}, 10, 128),
        (Form.NATIVE, {"text": "x" * 41, "sampling_params": {"max_new_tokens": 7, "n": 2}}, 11, 14),
        (Form.NATIVE, {"text": ["xxxx", "xxxx"], "sampling_params": [{"max_new_tokens": 1}, None]}, 2, 129),
        (Form.NATIVE, {"text": ["xxxx", "xxxx"]}, 2, 256),
        (Form.NATIVE, {"input_ids": [1, 2, 3]}, 3, 128),
        (Form.NATIVE, {"input_ids": [[1, 2, 3], [4]]}, 4, 256),
        (Form.NATIVE, {}, 0, 128),
        (Form.NATIVE, {"text": 5, "sampling_params": 5}, 0, 128),
        (Form.COMPLETION, {"prompt": "x" * 8}, 2, 16),
        (Form.COMPLETION, {"prompt": ["x" * 8, "x"], "max_tokens": 5, "n": 3}, 3, 30),
        (Form.COMPLETION, {"prompt": [1, 2, 3], "max_tokens": 5}, 3, 5),
        (Form.CHAT, {"messages": [{"role": "user", "content": "x" * 8}]}, 6, 1024),
        (Form.CHAT, {"messages": [{"content": [{"text": "x" * 8}, {"image_url": 1}]}], "max_tokens": 9}, 6, 9),
        (Form.CHAT, {"messages": [], "max_tokens": 9, "max_completion_tokens": 3, "n": 2}, 0, 6),
        (Form.COMPLETION, {"prompt": "x", "max_tokens": -5}, 1, 0),
        (Form.COMPLETION, {"prompt": "x", "max_tokens": "many", "n": None}, 1, 16),
        (Form.COMPLETION, {"prompt": "x", "max_tokens": 10**30}, 1, 10**9),
        # What SGLang reads as numbers, and what it does not read in this form.
        (Form.COMPLETION, {"prompt": "x" * 40, "messages": [], "max_completion_tokens": 0, "max_tokens": "70"}, 10, 70),
        (Form.COMPLETION, {"prompt": "x", "max_tokens": 7.0, "n": "3"}, 1, 21),
        (Form.CHAT, {"messages": [], "max_completion_tokens": 0, "max_tokens": 9}, 0, 9),
        (Form.CHAT, {"messages": [], "input_ids": [1, 2, 3], "max_tokens": 9}, 3, 9),
        (Form.CHAT, {"messages": [{"tool_calls": ["x" * 6]}], "tools": ["x" * 16], "max_tokens": 9}, 12, 9),
    ],
)
def test_a_request_is_estimated(form: Form, body: dict[str, Any], prompt: int, answers: int) -> None:
    estimated = estimate(body, form)
    assert (estimated.prompt, estimated.answers) == (prompt, answers)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
LISTS = st.lists(SCALARS, max_size=2) | st.lists(st.lists(SCALARS, max_size=2), max_size=2)
OBJECTS = st.dictionaries(
    st.sampled_from(["n", "max_new_tokens", "content", "text", "prompt_tokens", "completion_tokens"]), SCALARS | LISTS
)
JSON = SCALARS | LISTS | OBJECTS | st.lists(OBJECTS, max_size=2)
FIELDS = st.sampled_from(
    [
        "text",
        "input_ids",
        "sampling_params",
        "prompt",
        "messages",
        "n",
        "max_tokens",
        "usage",
        "meta_info",
    ]
)


@given(st.dictionaries(FIELDS, JSON), st.sampled_from(list(Form)))
def test_whatever_a_client_sends_has_an_estimate(body: dict[str, Any], form: Form) -> None:
    estimated = estimate(body, form)
    assert estimated.prompt >= 0
    assert estimated.answers >= 0
    assert form is Form.NATIVE or not has_several_answers(body, form)
    used = used_tokens(json.dumps({**body, "completion_tokens": 1}).encode())
    assert used is None or used >= 0


def used_tokens(answer: bytes) -> int | None:
    reader = AnswerReader(Form.NATIVE)
    reader.read(answer)
    return reader.usage.total_tokens


NATIVE = {"text": "a", "meta_info": {"prompt_tokens": 5, "completion_tokens": 2}}
OPENAI = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}}


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (NATIVE, 7),
        ([NATIVE, NATIVE], 14),
        (OPENAI, 7),
        ({"text": '"completion_tokens"'}, None),
        ({"usage": None}, None),
    ],
)
def test_an_answer_says_what_it_took(answer: Any, tokens: int | None) -> None:
    assert used_tokens(json.dumps(answer).encode()) == tokens


def stream(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def test_a_stream_says_what_it_took() -> None:
    one, many = {"text": "x" * 40}, {"text": ["x" * 40] * 2}

    def counted(body: dict[str, Any], *events: Any) -> int:
        about = estimate(body, Form.NATIVE)
        reader = AnswerReader(Form.NATIVE, several=has_several_answers(body, Form.NATIVE))
        whole = stream(*events)
        assert reader.read_events(whole) == whole
        charge = Charge(MemoryLimiter(), Reservation(KEY, "lease", 0, about.prompt + about.answers, {}), about)
        return charge.used(200, reader.usage)

    growing = [{"text": "a" * n, "meta_info": {"prompt_tokens": 9, "completion_tokens": n}} for n in range(1, 4)]
    assert counted(one, *growing) == 12
    assert counted(many, *({**event, "index": n % 2} for n, event in enumerate(growing))) == (9 + 3) + (9 + 2)
    assert counted(one, {"choices": []}, OPENAI) == 7
    assert counted(one, {"choices": []}, {"choices": []}, {"choices": [], "usage": None}) == 10 + 3


# Through the service.


@asynccontextmanager
async def limited(folder: Path, **limits: int) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A service, its runtime, and a client whose key has ``limits``."""
    async with (
        runtime() as (fake, address),
        replica(f"sqlite:///{folder}/control.db", address, admin_key=ADMIN_KEY) as client,
    ):
        key = await make_key(client, limits=limits)
        client.headers.update(bearer(key["key"]))
        yield client, fake


@pytest.mark.parametrize("route", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_a_request_beyond_the_limit_does_not_reach_the_runtime(tmp_path: Path, route: str) -> None:
    async with limited(tmp_path, requests_per_minute=2) as (client, fake):
        answers = [await client.post(route, json={}) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers["ratelimit"] for answer in answers[:2]] == ['"requests";r=1;t=60', '"requests";r=0;t=60']
        assert "2 requests per minute" in problem(answers[2], 429, "rate_limited")
        assert answers[2].json()["violated-policies"] == ["requests"]
        assert 58 <= int(answers[2].headers["retry-after"]) <= 61
        assert len(fake.asked) == 2
        assert (await client.get("/v1/models")).status_code == 200


async def test_the_tokens_of_an_answer_count(tmp_path: Path) -> None:
    async with limited(tmp_path, tokens_per_minute=200) as (client, _):

        async def left(**fake: Any) -> int:
            answer = await client.post("/v1/completions", json={"prompt": "x" * 40, "max_tokens": 50, **fake})
            assert answer.status_code in (200, 500), answer.text
            await client.get("/healthz")
            probe = await client.post("/v1/completions", json={"prompt": "", "max_tokens": 0, "fake": {"status": 500}})
            return int(probe.headers["ratelimit"].split("r=")[1].split(";")[0])

        used = {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 10}}
        assert await left(fake={"answer": used}) == 170
        assert await left(stream=True, fake={"events": [{"choices": []}, used]}) == 140
        # Nothing was generated, so nothing is charged.
        assert await left(fake={"status": 500}) == 140
        # Who does not say is charged the estimate of the prompt and a token for each event.
        assert await left(stream=True, fake={"chunks": 5}) == 125
        assert await left(fake={"answer": {"choices": []}}) == 65
        refused = await client.post("/v1/completions", json={"prompt": "x" * 40, "max_tokens": 56})
        assert "tokens per minute" in problem(refused, 429, "rate_limited")
        answer = await client.post("/v1/completions", json={"prompt": "x" * 40, "max_tokens": 191})
        assert "201 tokens" in problem(answer, 422, "exceeds_limit", "max_tokens")
        answer = await client.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 200}})
        problem(answer, 422, "exceeds_limit", "max_new_tokens")


async def test_a_refused_policy_costs_nothing(tmp_path: Path) -> None:
    async with limited(tmp_path, requests_per_minute=1, tokens_per_minute=1000) as (client, _):
        assert (await client.post("/generate", json={"text": "x", "attention": "nothing"})).status_code == 422
        assert (await client.post("/generate", json={"text": "x"})).status_code == 200


async def test_a_request_counts_until_its_client_has_left(tmp_path: Path) -> None:
    async with limited(tmp_path, concurrent_requests=1, tokens_per_minute=10_000) as (client, fake):
        for body in ({"stream": True, "fake": {"chunks": 5, "gated": True}}, {"fake": {"hang": True}}):
            asking = asyncio.create_task(client.post("/generate", json=body))
            fake.aborted.clear()
            fake.answering.clear()
            await fake.answering.wait()
            refused = await client.post("/generate", json={})
            problem(refused, 429, "rate_limited")
            assert refused.headers["retry-after"] == "1"
            asking.cancel()

            async def free() -> bool | None:
                return (await client.post("/generate", json={})).status_code == 200 or None

            await eventually(free)
            await fake.aborted.wait()


async def test_limits_go_on_in_each_replica_while_redis_is_away(tmp_path: Path) -> None:
    async with (
        redis_server(tmp_path) as server,
        runtime() as (_, address),
        replica(server.url, address, admin_key=ADMIN_KEY) as client,
    ):
        key = bearer((await make_key(client, limits={"requests_per_minute": 3}))["key"])
        assert (await client.post("/generate", json={}, headers=key)).headers["ratelimit"] == '"requests";r=2;t=60'
        await server.kill()
        statuses = [(await client.post("/generate", json={}, headers=key)).status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        await server.start()

        async def shared() -> bool | None:
            answer = await client.post("/generate", json={}, headers=key)
            return (answer.headers["ratelimit"] == '"requests";r=1;t=60') or None

        await eventually(shared)


# Two processes on one Redis.


async def test_limits_hold_within_one_percent_over_two_processes(tmp_path: Path) -> None:
    async with (
        redis_server(tmp_path) as server,
        runtime() as (fake, address),
        processes(server.url, tmp_path, address) as services,
    ):
        clients = [service.client for service in services]

        async def statuses(key: dict[str, str], number: int, body: dict[str, Any]) -> list[int]:
            async def ask(client: httpx.AsyncClient) -> int:
                return (await client.post("/v1/completions", json=body, headers=key)).status_code

            await eventually(lambda: known(clients, key), timeout_seconds=5)
            return await asyncio.gather(*(ask(clients[index % 2]) for index in range(number)))

        key = bearer((await make_key(clients[0], limits={"requests_per_minute": 200}))["key"])
        found = await statuses(key, 250, {"prompt": "x"})
        assert sorted(set(found)) == [200, 429]
        assert 198 <= found.count(200) <= 200

        used = {"choices": [], "usage": {"prompt_tokens": 6, "completion_tokens": 4}}
        key = bearer((await make_key(clients[0], limits={"tokens_per_minute": 1000}))["key"])
        spent = 0
        for _ in range(6):
            found = await statuses(key, 30, {"prompt": "x" * 24, "max_tokens": 10, "fake": {"answer": used}})
            spent += 10 * found.count(200)
        assert 990 <= spent <= 1000

        key = bearer((await make_key(clients[0], limits={"concurrent_requests": 20}))["key"])
        fake.most_concurrent = 0
        # Nobody is answered before 20 are there.
        found = await statuses(key, 50, {"prompt": "x", "fake": {"together": 20}})
        assert found.count(200) >= 20
        assert 429 in found
        assert fake.most_concurrent == 20
