"""Streams of SGLang's ``/generate``: its request, and what the events of its answer tell."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

_PREFIX: Final = "data: "
_END: Final = "data: [DONE]"


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
