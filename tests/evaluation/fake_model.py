"""An OpenAI-compatible server without a model: it finds needles by reading the prompt, on a real port."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

_VALUE = re.compile(r"\b\d{7}\b")
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+")


@dataclass
class FakeModel:
    """How the server behaves, and what it was asked.

    Attributes:
        template_tokens: what the chat template adds to a prompt.
        wrong_every: answers wrongly to about one prompt in so many, chosen by the prompt's text; 0 for never.
        failing_every, refusing_every: answers so with HTTP 500, with HTTP 400.
        breaking_every: ends so a stream in the middle.
        tokenize_limit: how many texts it counts before it answers with HTTP 503.
        continues: what it does with the beginning of a chat's answer: continue it, close the turn, or refuse.
        attention: what each streamed response carries beside its choices, given its token counts.
    """

    max_tokens: int = 32768
    tokens_per_word: int = 1
    template_tokens: int = 7
    has_tokenize: bool = True
    tokenize_limit: int | None = None
    wrong_every: int = 0
    failing_every: int = 0
    refusing_every: int = 0
    breaking_every: int = 0
    api_key: str | None = None
    continues: Literal["continues", "closes", "refuses"] = "continues"
    attention: Mapping[str, Any] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    tokenize_calls: int = 0

    def count(self, text: str) -> int:
        """Tokens of a text: words, split at white space."""
        return len(text.split()) * self.tokens_per_word

    def streamed(self) -> list[dict[str, Any]]:
        """The bodies of the requests that asked for a stream, which the evaluation's samples do."""
        return [body for body in self.bodies if body.get("stream")]


def find_values(prompt: str) -> list[str]:
    """The 7-digit values of the sentences that have most word pairs in common with the question, the last paragraph or
    line."""
    context, _, question = prompt.rpartition("\n\n" if "\n\n" in prompt else "\n")
    asked = _pairs(question)
    found = [(len(asked & _pairs(sentence)), sentence) for sentence in _SENTENCE_END.split(context)]
    found = [(common, sentence) for common, sentence in found if _VALUE.search(sentence)]
    most = max((common for common, _ in found), default=0)
    return [value for common, sentence in found if common == most for value in _VALUE.findall(sentence)]


def _pairs(text: str) -> set[tuple[str, str]]:
    words = re.findall(r"[a-z]+", text.lower())
    return set(itertools.pairwise(words))


def _one_in(prompt: str, every: int) -> bool:
    return every > 0 and int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8]) % every == 0


def build_app(fake: FakeModel) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "fake-1", "max_model_len": fake.max_tokens}]}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return {"device": "cpu", "version": "0.0-fake"}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        if not fake.has_tokenize:
            raise HTTPException(404)
        if fake.tokenize_calls == fake.tokenize_limit:
            raise HTTPException(503)
        fake.tokenize_calls += 1
        return {"count": fake.count((await request.json())["prompt"])}

    @app.post("/v1/tokenize")
    async def tokenize_chat(request: Request) -> dict[str, Any]:
        body = await request.json()
        if not fake.has_tokenize:
            raise HTTPException(404)
        text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        # As ids that can be read again: what they count is not asked.
        return {"tokens": [ord(character) for character in text]}

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        if fake.api_key is not None and request.headers.get("authorization") != f"Bearer {fake.api_key}":
            return JSONResponse({"error": {"message": "wrong key"}}, 401)
        body = await request.json()
        fake.bodies.append(body)
        chat = request.url.path.endswith("/chat/completions")
        prompt = "".join(each["content"] for each in body["messages"]) if chat else _text(body["prompt"])
        prompt_tokens = fake.count(prompt) + fake.template_tokens
        begun = chat and len(body["messages"]) > 1
        prompt_tokens += 5 if begun and fake.continues == "closes" else 0
        errors = {
            "the last message must be the user's": (400, begun and fake.continues == "refuses"),
            "Requested token count exceeds the context": (400, prompt_tokens + body["max_tokens"] > fake.max_tokens),
            "deliberate failure": (500, body.get("stream") and _one_in(prompt, fake.failing_every)),
            "deliberate refusal": (400, body.get("stream") and _one_in(prompt, fake.refusing_every)),
        }
        for message, (status, happens) in errors.items():
            if happens:
                return JSONResponse({"error": {"message": message}}, status)
        values = ["0000000"] if _one_in(prompt, fake.wrong_every) else find_values(prompt)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": min(len(values), body["max_tokens"])}
        if not body.get("stream"):
            return JSONResponse({"choices": [{"finish_reason": "length"}], "usage": usage})
        broken = _one_in(prompt, fake.breaking_every)
        return StreamingResponse(_events(fake, values, usage, chat=chat, broken=broken), media_type="text/event-stream")

    return app


def _text(prompt: str | list[int]) -> str:
    return prompt.removesuffix("\nAnswer:") if isinstance(prompt, str) else "".join(map(chr, prompt))


async def _events(
    fake: FakeModel, values: list[str], usage: dict[str, int], *, chat: bool, broken: bool
) -> AsyncIterator[str]:
    def event(chunk: dict[str, Any]) -> str:
        return f"data: {json.dumps(chunk)}\n\n"

    for value in values:
        text = f"{value}, "
        choice = {"delta": {"content": text}} if chat else {"text": text}
        yield event({"choices": [choice | {"finish_reason": None}]})
    if broken:
        return
    yield event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    yield event({"choices": [], "usage": usage})
    if fake.attention is not None:
        yield event({"choices": [], "attention": fake.attention})
    yield "data: [DONE]\n\n"


@contextmanager
def serving(fake: FakeModel) -> Iterator[str]:
    """Serve on a free port of this machine; gives the address."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        server = uvicorn.Server(uvicorn.Config(build_app(fake), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            # The socket listens already: what connects before the server runs waits in its queue.
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=30)
            assert not thread.is_alive()
