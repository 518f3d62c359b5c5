"""Answers of an OpenAI-compatible server: their text, times and attention statistics, or what went wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

_ERROR_CHARACTERS = 300


class RequestError(Exception):
    """A request that gave no answer.

    Attributes:
        status: the HTTP status, when the server answered with an error before streaming began.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def refused(self) -> bool:
        """Whether the server refused the request for what it asked, as it does with a prompt that is too long."""
        return self.status in (
            HTTPStatus.BAD_REQUEST,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            HTTPStatus.UNPROCESSABLE_ENTITY,
        )


@dataclass(frozen=True)
class Answer:
    """A streamed answer and its times in seconds.

    Attributes:
        latency: from sending the request to the end of the stream.
        ttft: from sending the request to the first token.
        tpot: between the first and the last token, divided by the number of tokens after the first; None when there
            are none, or when the server does not count its tokens.
        attention: the ``attention`` object of the response, if there was one.
    """

    text: str
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None
    latency: float
    ttft: float | None
    tpot: float | None
    attention: Mapping[str, Any] | None


@dataclass
class StreamedAnswer:
    """An answer as far as its stream has been read; times are of ``time.perf_counter``."""

    pieces: list[str] = field(default_factory=list)
    first_token: float | None = None
    last_token: float | None = None
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    attention: Mapping[str, Any] | None = None

    def add(self, chunk: object, now: float) -> None:
        """Take the next chunk of either API.

        Raises:
            RequestError: it is not a JSON object.
        """
        if not isinstance(chunk, Mapping):
            raise RequestError(f"the server sent what is not a JSON object: {shortened(json.dumps(chunk))}")
        self.usage = chunk.get("usage") or self.usage
        choices = chunk.get("choices") or [{}]
        choice = choices[0]
        text, thought = _texts(choice)
        self.pieces.append(text)
        if text or thought:
            self.first_token = self.first_token or now
            self.last_token = now
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.attention = attention_of(chunk) or self.attention

    def answer(self, started: float, ended: float) -> Answer:
        """Return the whole answer of a stream that ``started`` and ``ended`` at these times.

        Raises:
            RequestError: the stream ended early, or the server aborted the request.
        """
        if self.finish_reason is None:
            raise RequestError("the stream ended before the answer did")
        if self.finish_reason == "abort":
            raise RequestError("the server aborted the request")
        tokens = count_of(self.usage, "completion_tokens")
        tpot = None
        if self.first_token is not None and self.last_token is not None and tokens is not None and tokens > 1:
            tpot = (self.last_token - self.first_token) / (tokens - 1)
        return Answer(
            text="".join(self.pieces),
            finish_reason=self.finish_reason,
            prompt_tokens=count_of(self.usage, "prompt_tokens"),
            completion_tokens=tokens,
            latency=ended - started,
            ttft=None if self.first_token is None else self.first_token - started,
            tpot=tpot,
            attention=self.attention,
        )


def _texts(choice: Mapping[str, Any]) -> tuple[str, str]:
    """The answer's text and the reasoning text in one chunk of either API."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or "", delta.get("reasoning_content") or ""


def attention_of(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The ``attention`` object of an answer or a chunk of one, or of its first choice; of a list of them the first."""
    for holder in (answer, *(answer.get("choices") or ())[:1]):
        attention = holder.get("attention")
        if isinstance(attention, list) and attention:
            attention = attention[0]
        if isinstance(attention, Mapping) and attention:
            return attention
    return None


def count_of(holder: Mapping[str, Any], field_name: str) -> int | None:
    """Return a whole number of ``holder``; None if there is none."""
    number = holder.get(field_name)
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def error_text(body: Any) -> str:
    """The message in an error of OpenAI's, SGLang's or FastAPI's form."""
    for name in ("error", "message", "detail"):
        if isinstance(body, Mapping) and body.get(name):
            return error_text(body[name])
    return shortened(body if isinstance(body, str) else json.dumps(body))


def shortened(text: str) -> str:
    """Return the text, or its beginning if it is long."""
    return text if len(text) <= _ERROR_CHARACTERS else f"{text[:_ERROR_CHARACTERS]}..."
