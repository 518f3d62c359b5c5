from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from winnow_evaluation.over_http.answers import RequestError
from winnow_evaluation.over_http.client import OpenAIClient


def _stream(*events: dict[str, Any] | str) -> httpx.MockTransport:
    text = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
    return httpx.MockTransport(lambda _: httpx.Response(200, text=text))


def _text(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}


@pytest.mark.parametrize("attention", [{"decode": {"steps": 3}}, [{"decode": {"steps": 3}}]])
@pytest.mark.parametrize("in_choice", [True, False])
async def test_an_answer_has_its_text_usage_times_and_attention(attention: Any, in_choice: bool) -> None:
    last = _text("!", "stop")
    (last["choices"][0] if in_choice else last)["attention"] = attention
    async with OpenAIClient("http://x", transport=_stream(_text("a"), _text("b"), last, USAGE, "[DONE]")) as client:
        answer = await client.ask(await client.prepared("hello"), 10)
    assert (answer.text, answer.finish_reason) == ("ab!", "stop")
    assert (answer.prompt_tokens, answer.completion_tokens) == (9, 3)
    assert answer.attention == {"decode": {"steps": 3}}
    assert answer.ttft is not None
    assert answer.tpot is not None
    assert 0 < answer.ttft <= answer.ttft + 2 * answer.tpot <= answer.latency


async def test_times_tell_when_tokens_came() -> None:
    gate = asyncio.Event()

    class Gated(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
            await gate.wait()
            yield f"data: {json.dumps(_text('a', 'stop'))}\n\n".encode()
            yield f"data: {json.dumps(USAGE)}\n\ndata: [DONE]\n\n".encode()

    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Gated()))
    async with OpenAIClient("http://x", transport=transport) as client:
        loop = asyncio.get_running_loop()
        loop.call_later(0.2, gate.set)
        answer = await client.ask(await client.prepared("hello"), 10)
    assert answer.ttft is not None
    assert answer.ttft > 0.15


async def test_a_server_that_does_not_count_gives_no_tpot() -> None:
    async with OpenAIClient("http://x", transport=_stream(_text("a"), _text("b", "length"), "[DONE]")) as client:
        answer = await client.ask(await client.prepared("hello"), 10)
    assert (answer.prompt_tokens, answer.tpot, answer.attention) == (None, None, None)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ((_text("a"),), "ended before"),
        ((_text("a"), "[DONE]"), "ended before"),
        ((_text("a"), {"error": {"message": "out of memory"}}), "during the stream: out of memory"),
        ((_text("a", "abort"), "[DONE]"), "aborted"),
        (("{half",), "not JSON: {half"),
    ],
)
async def test_a_stream_that_breaks_is_an_error(events: tuple[Any, ...], message: str) -> None:
    async with OpenAIClient("http://x", transport=_stream(*events)) as client:
        with pytest.raises(RequestError, match=message):
            await client.ask(await client.prepared("hello"), 10)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": {"message": "no such policy"}}', "HTTP 400: no such policy"),
        ('{"message": "no such policy"}', "HTTP 400: no such policy"),
        ('{"detail": [{"loc": ["attention"]}]}', r'HTTP 400: \[{"loc": \["attention"\]}\]'),
        ("<html>", "HTTP 400: <html>"),
    ],
)
async def test_an_error_status_tells_the_servers_words(body: str, message: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(400, text=body))
    async with OpenAIClient("http://x", transport=transport) as client:
        with pytest.raises(RequestError, match=message) as caught:
            await client.ask(await client.prepared("hello"), 10)
    assert caught.value.refused


async def test_a_request_that_takes_too_long_is_an_error() -> None:
    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with OpenAIClient("http://x", timeout=0.05, transport=httpx.MockTransport(never)) as client:
        with pytest.raises(RequestError, match=r"within 0\.05 s \(--timeout\)"):
            await client.ask(await client.prepared("hello"), 10)


@pytest.mark.parametrize("url", ["http://x/prefix", "http://x/prefix/", "http://x/prefix/v1", "http://x/prefix/v1/"])
async def test_the_address_may_end_in_v1(url: str) -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 5}, {"id": "n"}]})

    async with OpenAIClient(url, transport=httpx.MockTransport(answer)) as client:
        model = await client.select_model()
    assert (model.name, model.max_tokens) == ("m", 5)
    assert seen == ["/prefix/v1/models"]


async def test_a_server_without_models_asks_for_a_name() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"data": []}))
    async with OpenAIClient("http://x", transport=transport) as client:
        with pytest.raises(RequestError, match="--model"):
            await client.select_model()


async def test_a_server_that_fails_to_tokenize_is_not_one_without_tokenize() -> None:
    async with OpenAIClient("http://x", transport=httpx.MockTransport(lambda _: httpx.Response(404))) as client:
        assert await client.tokenize("hello") is None
    async with OpenAIClient("http://x", transport=httpx.MockTransport(lambda _: httpx.Response(503))) as client:
        with pytest.raises(RequestError, match="HTTP 503"):
            await client.tokenize("hello")


async def test_a_request_that_failed_is_not_sent_again() -> None:
    seen: list[str] = []

    def fail(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        return httpx.Response(503)

    async with OpenAIClient("http://x", transport=httpx.MockTransport(fail)) as client:
        with pytest.raises(RequestError, match="HTTP 503"):
            await client.ask(await client.prepared("hello"), 10)
    assert seen == ["/v1/chat/completions"]


@pytest.mark.parametrize(("api_key", "sent"), [("a key", "Bearer a key"), (None, None), ("", None)])
async def test_only_a_key_that_was_given_is_sent(
    api_key: str | None, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "another server's key")
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("Authorization"))
        return httpx.Response(200, json={"data": [{"id": "m"}]})

    async with OpenAIClient("http://x", api_key=api_key, transport=httpx.MockTransport(answer)) as client:
        await client.select_model()
    assert seen == [sent]


async def test_a_stream_that_is_cut_is_an_error() -> None:
    class Cut(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield f"data: {json.dumps(_text('a'))}\n\n".encode()
            raise httpx.RemoteProtocolError("peer closed connection")

    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Cut()))
    async with OpenAIClient("http://x", transport=transport) as client:
        with pytest.raises(RequestError, match="x failed: RemoteProtocolError peer closed connection"):
            await client.ask(await client.prepared("hello"), 10)


async def test_a_server_that_is_not_there_is_an_error() -> None:
    async with OpenAIClient("http://127.0.0.1:1") as client:
        with pytest.raises(RequestError, match=r"cannot connect to http://127\.0\.0\.1:1"):
            await client.select_model()
