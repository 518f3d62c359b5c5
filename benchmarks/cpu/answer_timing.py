"""Asking a running SGLang server, and when each token of the answer came."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.generate_stream import GenerateClient, meta_of, request_body


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


class TimedServer(GenerateClient):
    """A running server that is asked one request at a time."""

    def ask(self, prompt: Sequence[int], tokens: int, attention: dict[str, Any] | None = None) -> Timing:
        """Stream an answer of ``tokens`` tokens.

        Raises:
            httpx.HTTPError: the server refuses.
            RuntimeError: it fails.
        """
        content = json.dumps(request_body(prompt, tokens, attention))
        sent = time.perf_counter()
        return read_timing((seconds - sent, line) for seconds, line in self.events(content))
