"""Asking a running SGLang server, and when each token of the answer came."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType
from typing import Any, Final, Self

import httpx

from benchmarks.generate_stream import meta_of, request_body

_TIMEOUT_SECONDS: Final = 900


@dataclass(frozen=True)
class Timing:
    """When an answer's tokens came.

    Attributes:
        arrivals: seconds from sending the request, one for each token.
        cached_tokens: of the prompt, those in the radix cache.
        attended_ratio: of the context's tokens, those attended to in decode; None from a server that does not count.
    """

    arrivals: Sequence[float]
    cached_tokens: int
    attended_ratio: float | None

    @property
    def ttft(self) -> float:
        return self.arrivals[0]

    @property
    def first_step(self) -> float:
        """Seconds of the first decode step: it builds what is missing of an index."""
        return self.arrivals[1] - self.arrivals[0]

    def tpot(self, answers: int = 1) -> list[float]:
        """Return the mean seconds of a decode step, in each of as many equal parts as ``answers``.

        The first step, and what is left over at the end, belong to no part.

        Raises:
            ValueError: there are too few tokens.
        """
        steps = [after - before for before, after in zip(self.arrivals[1:], self.arrivals[2:], strict=False)]
        part = len(steps) // answers
        if part < 1:
            raise ValueError(f"answers: {len(self.arrivals)} tokens do not give {answers} parts")
        return [fmean(steps[i * part : (i + 1) * part]) for i in range(answers)]


def read_timing(events: Iterable[tuple[float, str]]) -> Timing:
    """Read a stream of ``/generate``: seconds from sending the request, and a line of server-sent events.

    Raises:
        RuntimeError: the server reports an error, or the stream ends before the answer does.
    """
    arrivals: list[float] = []
    meta: dict[str, Any] = {}
    for seconds, meta in meta_of(events):
        arrivals += [seconds] * (meta["completion_tokens"] - len(arrivals))
    decode = (meta.get("attention") or {}).get("decode") or {}
    return Timing(arrivals, meta["cached_tokens"], decode.get("attended_ratio"))


class TimedServer:
    """A running server. Use it as a context manager."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def empty_cache(self) -> None:
        """Forget all prompts."""
        self._http.post("/flush_cache", params={"timeout": 60}).raise_for_status()

    def ask(self, prompt: Sequence[int], tokens: int, attention: dict[str, Any] | None = None) -> Timing:
        """Stream an answer of ``tokens`` tokens.

        Raises:
            httpx.HTTPError: the server refuses.
            RuntimeError: it fails.
        """
        content = json.dumps(request_body(prompt, tokens, attention))
        sent = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        with self._http.stream("POST", "/generate", content=content, headers=headers) as response:
            response.raise_for_status()
            return read_timing((time.perf_counter() - sent, line) for line in response.iter_lines())
