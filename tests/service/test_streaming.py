"""Answers that are streamed."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any, ClassVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from tests.service.conftest import SILENCE_SECONDS, Deployment
from tests.service.test_forwarding import Samples, key, samples
from tests.service.waiting import eventually
from winnow_service.errors import RuntimeFailure
from winnow_service.headers import RawHeaders
from winnow_service.proxy.event_stream import EventSplitter, EventStreamResponse
from winnow_service.proxy.incidents import Incidents
from winnow_service.runtime.runtime import Call

STREAMING_ROUTES = ["/generate", "/v1/completions", "/v1/chat/completions"]


def events(text: str) -> list[Any]:
    """The events of a stream, each of which must be whole."""
    *whole, rest = text.split("\n\n")
    assert rest == ""
    data = [event.removeprefix("data: ") for event in whole]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


@pytest.mark.parametrize("route", STREAMING_ROUTES)
async def test_each_event_arrives_before_the_next_is_sent(service: Deployment, route: str) -> None:
    body = {"stream": True, "fake": {"chunks": 4, "gated": True}}
    async with service.client.stream("POST", route, json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        chunks = answer.aiter_raw()
        for index in range(4):
            service.runtime.gate.release()
            [event] = events((await anext(chunks)).decode())
            assert event["index"] == index
            assert service.runtime.events_sent == index + 1
        assert await anext(chunks) == b"data: [DONE]\n\n"
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)


@pytest.mark.parametrize("route", STREAMING_ROUTES)
@pytest.mark.parametrize("how", ["die_after", "end_after", "half"])
@pytest.mark.parametrize("after", [0, 2])
async def test_a_stream_that_breaks_off_ends_with_an_error_event(
    service: Deployment, route: str, how: str, after: int
) -> None:
    answer = await service.client.post(route, json={"stream": True, "fake": {how: after}})
    *whole, last = events(answer.text)
    assert [event["index"] for event in whole] == list(range(after))
    assert last["error"]["code"] == "runtime_died"
    assert last["error"]["type"] == "runtime_error"
    found = await samples(service.client)
    assert found[key("winnow_runtime_errors_total", kind="runtime_died")] == 1
    assert key("winnow_client_disconnects_total", route=route) not in found


async def test_a_stream_that_falls_silent_ends_with_an_error_event(service: Deployment) -> None:
    service.runtime.gate.release()
    answer = await service.client.post("/generate", json={"stream": True, "fake": {"gated": True}})
    first, last = events(answer.text)
    assert first["index"] == 0
    assert last["error"]["code"] == "runtime_timeout"
    await asyncio.wait_for(service.runtime.aborted.wait(), 5)


@pytest.mark.parametrize("route", STREAMING_ROUTES)
async def test_a_client_that_leaves_a_stream_aborts_its_request(service: Deployment, route: str) -> None:
    service.runtime.gate.release()
    body = {"stream": True, "fake": {"gated": True}}
    async with service.client.stream("POST", route, json=body) as answer:
        await anext(answer.aiter_raw())
    await asyncio.wait_for(service.runtime.aborted.wait(), 0.8 * SILENCE_SECONDS)
    counter = key("winnow_client_disconnects_total", route=route)

    async def look() -> Samples | None:
        found = await samples(service.client)
        return found if counter in found else None

    found = await eventually(look)
    assert found[counter] == 1
    assert not any(name == "winnow_runtime_errors_total" for name, _ in found)


@pytest.mark.parametrize("silence_seconds", [15.0])
async def test_two_hundred_streams_at_once(service: Deployment) -> None:
    async def stream() -> list[Any]:
        answer = await service.client.post("/generate", json={"stream": True, "fake": {"chunks": 5}})
        return events(answer.text)

    for answer in await asyncio.gather(*(stream() for _ in range(200))):
        assert len(answer) == 6
        assert answer[-1] == "[DONE]"


async def test_the_first_event_is_written_before_the_second_is_read() -> None:
    # An event loop that writes when it gets its turn must get it: all of a short answer may be there already.
    loop = asyncio.get_running_loop()
    order: list[str] = []

    class Whole:
        status = 200
        headers: ClassVar[RawHeaders] = []

        async def chunks(self) -> AsyncIterator[bytes]:
            for name in ("first", "second"):
                order.append(f"read {name}")
                yield f"data: {name}\n\n".encode()
            yield b"data: [DONE]\n\n"

        async def close(self) -> None:
            order.append("closed")

    async def send(message: Message) -> None:
        if body := message.get("body"):
            loop.call_soon(order.append, f"written {body.split()[1].decode()}")

    async def stays() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    class Noted:
        def runtime_failed(self, _: RuntimeFailure) -> None:
            order.append("failed")

        def client_left(self) -> None:
            order.append("left")

    response = EventStreamResponse(cast(Call, Whole()), cast(Incidents, Noted()), stall_seconds=1)
    await response({"type": "http"}, stays, send)
    assert order[:3] == ["read first", "written first", "read second"]
    assert "closed" in order
    assert not {"failed", "left"} & set(order)


_EVENT = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=20).map(
    lambda t: f"data: {t}".encode()
)


@given(
    st.lists(_EVENT, max_size=8),
    st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"]),
    st.binary(max_size=0) | _EVENT,
    st.lists(st.integers(0, 200), max_size=12),
    st.booleans(),
)
def test_splitting_gives_whole_events_whatever_the_chunks(
    whole: list[bytes], end: bytes, rest: bytes, cuts: list[int], done: bool
) -> None:
    whole = [event for event in whole if event != b"data: [DONE]"] + [b"data: [DONE]"] * done
    stream = b"".join(event + end for event in whole) + rest
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    splitter = EventSplitter()
    passed = [splitter.feed(stream[start:stop]) for start, stop in itertools.pairwise(places)]

    assert b"".join(passed) == stream[: len(stream) - len(rest)]
    assert all(part == b"" or part.endswith(end) for part in passed)
    assert splitter.done is done


def test_done_inside_an_answer_is_not_the_end() -> None:
    splitter = EventSplitter()
    splitter.feed(b'data: {"text": "data: [DONE]"}\n\n')
    assert not splitter.done
