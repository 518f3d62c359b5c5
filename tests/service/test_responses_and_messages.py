"""The forms of OpenAI's Responses and Anthropic's Messages: their ends, their counts, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.service.conftest import Deployment
from winnow_service.proxy.answer import AnswerReader
from winnow_service.proxy.body import Form
from winnow_service.proxy.estimate import Estimate, estimate
from winnow_service.proxy.event_stream import EventSplitter

ATTENTION = {"decode": {"policy": "quest", "steps": 5}, "prefill": {"tokens": 3, "cached_tokens": 9}, "warnings": []}
RESPONSE_USAGE = {"input_tokens": 12, "output_tokens": 6}
RESPONSE: list[tuple[str, Any]] = [
    ("response.created", {"response": {"usage": None}}),
    ("response.output_text.delta", {"delta": "event: response.completed"}),
    ("response.completed", {"response": {"usage": RESPONSE_USAGE, "attention": ATTENTION}}),
]
# Of the prompt, nine tokens were cached.
MESSAGE: list[tuple[str, Any]] = [
    (
        "message_start",
        {"message": {"usage": {"input_tokens": 3, "cache_read_input_tokens": 9, "output_tokens": 0}}},
    ),
    ("content_block_delta", {"delta": {"text": "event: message_stop\n"}}),
    ("message_delta", {"usage": {"output_tokens": 6}, "attention": ATTENTION}),
    ("message_stop", {}),
]
STREAMS = [(Form.RESPONSES, RESPONSE), (Form.MESSAGES, MESSAGE)]


def event(name: str, content: dict[str, Any]) -> bytes:
    data = json.dumps({"type": name} | content, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n".encode()


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("form", "events"), STREAMS)
def test_a_stream_ends_with_its_last_event(form: Form, events: list[tuple[str, Any]], size: int) -> None:
    splitter, other = EventSplitter(form), EventSplitter(Form.CHAT)
    before = b"".join(event(*each) for each in events[:-1])
    last = event(*events[-1])
    for stream, done in ((before, False), (last, True)):
        parts = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert b"".join(splitter.feed(part) for part in parts) == stream
        assert splitter.done is done
        other.feed(stream)
    assert not other.done


@pytest.mark.parametrize("with_attention", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("form", "events"), STREAMS)
def test_a_stream_says_what_it_took(
    form: Form, events: list[tuple[str, Any]], at_once: bool, with_attention: bool
) -> None:
    reader = AnswerReader(form)
    parts = [event(*each) for each in events]
    if not with_attention:
        parts = [part.replace(b'"attention"', b'"other"') for part in parts]
    for part in [b"".join(parts)] if at_once else parts:
        assert reader.read_events(part) == part
    usage = reader.usage
    assert (usage.prompt_tokens, usage.output_tokens, usage.total_tokens) == (12, 6, 18)
    assert usage.events == len(events)
    assert usage.attention == ((ATTENTION,) if with_attention else ())


@pytest.mark.parametrize("form", [Form.RESPONSES, Form.MESSAGES])
def test_a_whole_answer_says_what_it_took(form: Form) -> None:
    reader = AnswerReader(form)
    reader.read(json.dumps({"usage": RESPONSE_USAGE, "attention": ATTENTION}).encode())
    assert (reader.usage.total_tokens, reader.usage.attention) == (18, (ATTENTION,))


@pytest.mark.parametrize(("form", "events"), STREAMS)
def test_warnings_join_those_of_the_answer(form: Form, events: list[tuple[str, Any]]) -> None:
    reader = AnswerReader(form, ["clamped"])
    written = b"".join(reader.read_events(event(*each)) for each in events)
    assert written.count(b'"warnings":["clamped"]') == 1


@pytest.mark.parametrize(
    ("form", "body", "expected"),
    [
        (Form.RESPONSES, {"input": "x" * 40, "instructions": "x" * 8, "max_output_tokens": 7}, Estimate(12, 7)),
        (Form.RESPONSES, {"input": [{"role": "user", "content": "x" * 40}]}, Estimate(14, 1024)),
        (
            Form.MESSAGES,
            {"messages": [{"role": "user", "content": "x" * 40}], "system": "x" * 8, "max_tokens": 3},
            Estimate(4 + 10 + 2, 3),
        ),
    ],
)
def test_an_estimate(form: Form, body: dict[str, Any], expected: Estimate) -> None:
    assert estimate(body, form) == expected


async def test_a_response_in_the_background_is_refused(service: Deployment) -> None:
    answer = await service.client.post("/v1/responses", json={"input": "a", "background": True})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == "background"
    assert not service.runtime.asked
