"""A runtime that answers as SGLang does, streams when told to, breaks off, hangs, and records what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from tests.service.spoken_answer import spoken

# How the service's own requests are called, which ask whether fields come here.
PROBE = b"winnow-probe-"


@dataclass(frozen=True)
class Asked:
    """One request as the fake runtime got it."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


@dataclass
class FakeRuntime:
    """What a request's ``"fake"`` object may hold:

    - ``chunks``: how many events (3);
    - ``die_after``, ``end_after``: break off, or end without [DONE], after so many events;
    - ``half``: break off in the middle of that event;
    - ``gated``: wait for ``gate`` before each event;
    - ``pause``: wait so many seconds before each event but the first;
    - ``pad``: make each event so many bytes longer;
    - ``hang``: never answer;
    - ``status``: answer with that status;
    - ``die``: break off in the middle of a JSON answer;
    - ``together``: answer when so many requests are there at once;
    - ``answer``, ``events``: what to answer, or to stream, instead.

    Attributes:
        model: the name of its model, which it tells the service; clients' own requests for it are answered as others.
        hides_model: whether it tells no name.
        loses_fields: whether it answers as if behind a balancer that writes requests anew.
        is_plain: whether it is SGLang without Winnow, which does not look at ``custom_params``.
        probed: the paths at which the service asked whether fields come here.
        server_info: what ``/server_info`` answers, with ``server_info_status``.
        word_seconds: if there is such a time, streams are those of OpenAI's clients: the words of the prompt, at that
            pace, and what their attention cost.
        gates_words: whether each of them waits for ``gate``, too.
        explanation: what a request that asks for one is answered, with ``explanation_status``.
    """

    healthy: bool = True
    model: str = "needle"
    hides_model: bool = False
    loses_fields: bool = False
    is_plain: bool = False
    probed: list[str] = field(default_factory=list)
    server_info: dict[str, Any] = field(default_factory=dict)
    server_info_status: int = 200
    explanation: dict[str, Any] | None = None
    explanation_status: int = 200
    server_info_asked: list[dict[str, str]] = field(default_factory=list)
    word_seconds: float | None = None
    gates_words: bool = False
    asked: list[Asked] = field(default_factory=list)
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    events_sent: int = 0
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    together: asyncio.Event = field(default_factory=asyncio.Event)
    concurrent: int = 0
    most_concurrent: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/server_info", self.tell, methods=["GET"])
        app.add_api_route("/{path:path}", self.answer, methods=["GET", "POST"])
        return app

    async def health(self) -> Response:
        return Response(status_code=200 if self.healthy else 503)

    async def tell(self, request: Request) -> Response:
        self.server_info_asked.append(dict(request.headers.items()))
        return JSONResponse(self.server_info, self.server_info_status)

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        if (of_service := self._answer_service(request, body)) is not None:
            return of_service
        self.asked.append(
            Asked(
                request.method,
                request.scope["raw_path"].decode(),
                request.url.query,
                dict(request.headers.items()),
                body,
            )
        )
        asked: dict[str, Any] = json.loads(body) if body else {}
        fake: dict[str, Any] = asked.get("fake", {})
        self.answering.set()
        self.concurrent += 1
        self.most_concurrent = max(self.most_concurrent, self.concurrent)
        try:
            if fake.get("hang"):
                await self._hang(request)
            if "status" in fake:
                return JSONResponse({"error": {"message": "no"}}, fake["status"], headers={"x-from-runtime": "1"})
            if self.word_seconds is not None and asked.get("stream"):
                fake = {"events": spoken(asked), "pause": self.word_seconds, "gated": self.gates_words}
            if asked.get("stream"):
                return StreamingResponse(self._events(fake), media_type="text/event-stream")
            if fake.get("die"):
                return StreamingResponse(_broken_json(), media_type="application/json")
            if self.explanation is not None and b"attention_explain" in body:
                fake = {"answer": self.explanation}
            if "together" in fake:
                await self._gather(fake["together"])
            if "answer" in fake:
                return JSONResponse(fake["answer"], self.explanation_status)
            return JSONResponse({"path": request.url.path, "text": "an answer"}, headers={"x-from-runtime": "1"})
        finally:
            self.concurrent -= 1

    def _answer_service(self, request: Request, body: bytes) -> Response | None:
        """Answer what the service itself wants to know: which model is served, and whether its fields come here."""
        path = request.url.path
        is_of_client = "x-request-id" in request.headers and self.word_seconds is None
        if path == "/v1/models" and not is_of_client:
            models = [{"id": self.model}, {"id": "an adapter"}]
            return JSONResponse({} if self.hides_model else {"object": "list", "data": models})
        if PROBE not in body:
            return None
        self.probed.append(path)
        asked = json.loads(body)
        rid = "another" if self.loses_fields else asked["rid"]
        if asked.get("sampling_params", asked)["custom_params"] and not (self.loses_fields or self.is_plain):
            return JSONResponse({"object": "error", "message": "attention.decode.policy: must be another"}, 400)
        return JSONResponse({"id": rid, "choices": []} if "chat" in path else {"text": "a", "meta_info": {"id": rid}})

    async def _gather(self, number: int) -> None:
        if self.concurrent == number:
            self.together.set()
        await self.together.wait()

    async def _hang(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.aborted.set()

    async def _events(self, fake: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            for event in fake.get("events", ()):
                await asyncio.sleep(fake.get("pause", 0))
                if fake.get("gated"):
                    await self.gate.acquire()
                yield b"data: " + json.dumps(event).encode() + b"\n\n"
            for index in range(0 if "events" in fake else fake.get("chunks", 3)):
                if fake.get("gated"):
                    await self.gate.acquire()
                if index and "pause" in fake:
                    await asyncio.sleep(fake["pause"])
                if fake.get("die_after") == index:
                    raise BreakOff
                if fake.get("end_after") == index:
                    return
                text = "x" * fake["pad"] if "pad" in fake else "word " * (index + 1)
                event = b"data: " + json.dumps({"text": text, "index": index}).encode() + b"\n\n"
                if fake.get("half") == index:
                    yield event[: len(event) // 2]
                    raise BreakOff
                self.events_sent += 1
                yield event
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.set()
            raise


class BreakOff(Exception):
    """Ends a connection in the middle of its answer: the server closes it without the final chunk."""


async def _broken_json() -> AsyncIterator[bytes]:
    yield b'{"text": "an ans'
    raise BreakOff
