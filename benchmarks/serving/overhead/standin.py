"""The stand-in for the runtime: an HTTP server that streams what SGLang would, at the pace that a request asks for.

    python -m benchmarks.serving.overhead.standin --port 30000

It computes nothing and knows no more of HTTP than the service needs of it, so that its own work is small. A request
says in ``paced`` how many chunks it wants, how long after the request the first comes, and how long after each the
next; one that does not gets as many as it allows tokens, at the pace of a fast model.
"""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from winnow_kernels.policies.registry import DECODE_POLICIES, PREFILL_POLICIES

HOST: Final = "127.0.0.1"
MODEL: Final = "stand-in"
_SERVED: Final = {
    "layers": 32,
    "context_length": 131_072,
    "delta_layers": [2, 6],
    "policies": list(DECODE_POLICIES),
    "prefill_policies": list(PREFILL_POLICIES),
}
_FAST_FIRST_SECONDS: Final = 0.05
_FAST_INTERVAL_SECONDS: Final = 0.01
_PROMPT_TOKENS: Final = 1000
_STEM: Final = {"id": "c" * 32, "created": 1_700_000_000, "model": MODEL}
_END: Final = {"logprobs": None, "finish_reason": None, "matched_stop": None}
_DELTA: Final = {"role": None, "content": " word", "reasoning_content": None, "tool_calls": None}
_FORMS: Final[dict[bytes, dict[str, Any]]] = {
    b"/v1/chat/completions": {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": _DELTA, **_END}]},
    b"/v1/completions": {"object": "text_completion", "choices": [{"index": 0, "text": " word", **_END}]},
}
# What the chunk with the attention has for choices: clients of text completions expect one in every chunk.
_NO_TEXT: Final[dict[bytes, list[dict[str, Any]]]] = {
    b"/v1/chat/completions": [],
    b"/v1/completions": [{"index": 0, "text": "", **_END}],
}
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
)


@dataclass(frozen=True)
class Pace:
    """How an answer comes. Times are in seconds.

    Attributes:
        first: from the request to the first chunk.
        interval: from a chunk to the next.
    """

    chunks: int
    first: float
    interval: float


def _framed(event: bytes) -> bytes:
    data = b"data: " + event + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


_CHUNKS: Final = {path: _framed(_json({**_STEM, **form, "usage": None})) for path, form in _FORMS.items()}


def _end(path: bytes, chunks: int, *, with_usage: bool) -> bytes:
    stem = {**_STEM, **_FORMS[path], "choices": []}
    usage = {"prompt_tokens": _PROMPT_TOKENS, "completion_tokens": chunks, "total_tokens": _PROMPT_TOKENS + chunks}
    decode = {"policy": "dense", "steps": chunks - 1, "dense_steps": 0, "context_tokens": _PROMPT_TOKENS + chunks - 1}
    cost = {"decode": decode | {"attended_ratio": 1.0, "kv_read_ratio": 1.0}}
    events = [_json(stem | {"usage": usage})] if with_usage else []
    events += [_json(stem | {"choices": _NO_TEXT[path], "attention": cost}), b"[DONE]"]
    return b"".join(_framed(event) for event in events) + b"0\r\n\r\n"


def _pace(body: dict[str, Any]) -> Pace:
    if "paced" in body:
        return Pace(**body["paced"])
    return Pace(int(body.get("max_tokens", 16)), _FAST_FIRST_SECONDS, _FAST_INTERVAL_SECONDS)


class _Connection(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        method, path, *_ = head.split(b"\r\n")[0].split(b" ")
        if method == b"GET":
            self._answer(self._whole(bytes(path)))
        elif len(body) >= _content_length(bytes(head)):
            self._received.clear()
            asked = json.loads(body)
            if "rid" in asked:
                # The service asks whether fields come here as they are sent.
                self._answer({"message": "attention.decode.policy: must be another"}, b"400 Bad Request")
                return
            with_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
            self._stream(bytes(path), _pace(asked), with_usage=with_usage)

    def _whole(self, path: bytes) -> object:
        if path == b"/v1/models":
            return {"object": "list", "data": [{"id": MODEL}]}
        return {"winnow": _SERVED} if path == b"/server_info" else {}

    def _answer(self, value: object, status: bytes = b"200 OK") -> None:
        body = _json(value)
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self._transport.write(head % (status, len(body)) + body)
        self._transport.close()

    def _stream(self, path: bytes, pace: Pace, *, with_usage: bool) -> None:
        loop = asyncio.get_running_loop()
        self._transport.write(_STREAM_HEAD)
        first = loop.time() + pace.first
        sent = 0
        chunk = _CHUNKS[path]

        def send() -> None:
            nonlocal sent
            sent += 1
            self._transport.write(chunk)
            if sent < pace.chunks:
                self._timer = loop.call_at(first + sent * pace.interval, send)
            else:
                self._transport.write(_end(path, pace.chunks, with_usage=with_usage))
                self._transport.close()

        self._timer = loop.call_at(first, send)


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


async def serve(port: int) -> None:
    """Serve on loopback until SIGTERM."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    server: Any = await loop.create_server(_Connection, HOST, port, backlog=4096)
    async with server:
        await stopped.wait()


def main(port: Annotated[int, typer.Option(help="Port to listen on, on loopback.")]) -> None:
    """Stand in for the runtime, on loopback."""
    asyncio.run(serve(port))


if __name__ == "__main__":
    typer.run(main)
