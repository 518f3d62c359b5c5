"""Streams of SGLang's ``/generate``: its request, and what the events of its answer tell."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import httpx

_PREFIX: Final = "data: "
_END: Final = "data: [DONE]"
_TIMEOUT_SECONDS: Final = 900


def request_body(
    prompt: Sequence[int], tokens: int, attention: Mapping[str, Any] | None, **sampling: Any
) -> dict[str, Any]:
    """Return a request for exactly ``tokens`` tokens behind ``prompt``; ``sampling`` has more sampling parameters."""
    parameters: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
    if attention is not None:
        parameters["custom_params"] = {"attention": json.dumps(attention)}
    return {"input_ids": list(prompt), "sampling_params": parameters, "stream": True}


def meta_of(events: Iterable[tuple[float, str]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the ``meta_info`` of each event, with its time.

    Args:
        events: seconds, and a line of server-sent events.

    Raises:
        RuntimeError: the server reports an error, or the stream ends before the answer does.
    """
    meta: dict[str, Any] = {}
    for seconds, line in events:
        if not line.startswith(_PREFIX) or line == _END:
            continue
        event = json.loads(line.removeprefix(_PREFIX))
        if "error" in event:
            raise RuntimeError(f"the server answers: {event['error']}")
        meta = event["meta_info"]
        yield seconds, meta
    reason = meta.get("finish_reason") or {}
    if reason.get("type") != "length":
        raise RuntimeError(f"the answer did not end as it should: {reason or 'the stream broke off'}")


def answer_of(lines: Iterable[str]) -> list[int]:
    """Return the token ids of a streamed answer; each of its events has all of them so far."""
    *_, last = (line for line in lines if line.startswith(_PREFIX) and line != _END)
    tokens: list[int] = json.loads(last.removeprefix(_PREFIX))["output_ids"]
    return tokens


@dataclass(frozen=True)
class WholeAnswer:
    """A whole answer.

    Attributes:
        tokens: its ids.
        seconds: from its first token to its last.
        attention: what its attention cost.
    """

    tokens: Sequence[int]
    seconds: float
    attention: Mapping[str, Any]


class GenerateClient:
    """A running server. Use it as a context manager."""

    def __init__(self, url: str, most: int = 1) -> None:
        """For up to ``most`` requests at once."""
        limits = httpx.Limits(max_connections=most + 1, max_keepalive_connections=most + 1)
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_SECONDS, limits=limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def empty_cache(self) -> None:
        """Forget all prompts."""
        self._http.post("/flush_cache", params={"timeout": 60}).raise_for_status()

    def events(self, body: str) -> Iterator[tuple[float, str]]:
        """Send a request; yield the lines that answer it, each with its time, by ``time.perf_counter``.

        Raises:
            httpx.HTTPError: the server refuses.
        """
        headers = {"Content-Type": "application/json"}
        with self._http.stream("POST", "/generate", content=body, headers=headers) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                yield time.perf_counter(), line

    def answer(self, body: str) -> WholeAnswer:
        """Send a request; return its whole answer.

        Raises:
            httpx.HTTPError: the server refuses.
            RuntimeError: it fails.
        """
        lines = list(self.events(body))
        metas = list(meta_of(lines))
        (first, _), (last, meta) = metas[0], metas[-1]
        return WholeAnswer(answer_of(line for _, line in lines), last - first, meta["attention"])

    def log_probabilities(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return the log-probability that each of some tokens has behind a prompt, by dense attention.

        Raises:
            httpx.HTTPError: the server refuses.
        """
        body = request_body(prompt, 1, None) | {"stream": False, "return_logprob": True}
        response = self._http.post("/generate", json=body | {"token_ids_logprob": list(tokens)})
        [found] = response.raise_for_status().json()["meta_info"]["output_token_ids_logprobs"]
        of_tokens = {token: logprob for logprob, token, *_ in found}
        return [of_tokens[token] for token in tokens]
