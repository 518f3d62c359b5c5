"""Reading an OpenAI stream, and the times in it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

_EVENT: Final = b"data:"
_DONE: Final = b"[DONE]"


class StreamBroken(Exception):
    """The stream did not come to its end, or ended with an error. The message has the error's code."""


@dataclass(frozen=True)
class StreamTimes:
    """Times of a complete stream, in seconds since the request was sent.

    Attributes:
        first: of the first event.
        last: of the last one that had a part of the answer.
        end: of its end.
        tokens: of the answer, as the stream tells them; else one for each event with a part of it.
        text: the answer of a chat.
    """

    first: float
    last: float
    end: float
    tokens: int
    text: str

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None if there is none."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None


def read_stream(lines: Iterable[bytes], started: float, clock: Callable[[], float] = time.perf_counter) -> StreamTimes:
    """Read a stream's ``lines`` to their end.

    Args:
        started: when the request was sent, by ``clock``.

    Raises:
        StreamBroken: it was not complete.
    """
    first = last = None
    parts, tokens = 0, None
    text: list[str] = []
    for line in lines:
        if not line.startswith(_EVENT):
            continue
        now = clock() - started
        first = now if first is None else first
        content = line.removeprefix(_EVENT).strip()
        if content == _DONE:
            if last is None:
                raise StreamBroken("empty")
            return StreamTimes(first, last, now, parts if tokens is None else tokens, "".join(text))
        event = _parsed(content)
        if "error" in event:
            raise StreamBroken(error_code(event))
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        if event.get("choices") != []:
            parts, last = parts + 1, now
            text.append(_text(event))
    raise StreamBroken("incomplete")


def error_code(problem: object) -> str:
    """The code in an error of the service; "unknown" if it has none."""
    error = problem.get("error") if isinstance(problem, dict) else None
    return str(error.get("code") or "unknown") if isinstance(error, dict) else "unknown"


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        event = json.loads(content)
    except ValueError:
        raise StreamBroken("not_json") from None
    if not isinstance(event, dict):
        raise StreamBroken("not_json")
    return event


def _text(event: dict[str, Any]) -> str:
    choices = event.get("choices")
    if not isinstance(choices, list):
        return ""
    return "".join(str(choice.get("delta", {}).get("content") or "") for choice in choices)
