"""Whether requests come to the runtime as they are sent.

A balancer that reads requests into types of its own and writes them anew drops fields that it does not know. Without
``custom_params`` a request is answered densely, without ``cache_salt`` tenants share a cache; nobody is told. So a
request is sent that a runtime with Winnow refuses, before it queues, for what is in ``custom_params``. Where it is
answered with a token, there must be no Winnow, and the answer must have the request's own ``rid``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from winnow_service.errors import RuntimeFailure
from winnow_service.runtime.client import RuntimeClient

# There is no such policy, and the runtime's refusal names the field.
_PARAMETERS: Final[JsonValue] = {"attention": to_json({"decode": {"policy": "winnow-probe"}}).decode()}
_REFUSED_FIELD: Final = b"attention.decode.policy"
_GENERATE: Final = "/generate"
_INFORMATION: Final = "/server_info"
_CHAT: Final = "/v1/chat/completions"
# A runtime that has too much to do is asked again later. Winnow's refuses at once.
_PATIENCE_SECONDS: Final = 5.0
_AGAIN_SECONDS: Final = 30.0


@dataclass(frozen=True)
class FieldsVerdict:
    """What was found.

    Attributes:
        lost: what is wrong with the upstream, as a sentence; None if nothing was seen.
        certain: whether an answer has shown it, one way or the other.
    """

    lost: str | None
    certain: bool


_UNCERTAIN: Final = FieldsVerdict(None, certain=False)


class FieldsCheck:
    """Remembers the verdict on one upstream.

    Args:
        headers: of the requests that are sent.
        clock: seconds that only go forward.
    """

    def __init__(
        self, client: RuntimeClient, headers: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._headers = headers
        self._clock = clock
        self._verdict = _UNCERTAIN
        self._again = clock()

    def forget(self) -> None:
        """It was away, and may be another."""
        self._verdict = _UNCERTAIN
        self._again = self._clock()

    async def lost(self) -> str | None:
        """What is wrong with the upstream, asked anew if that is not known, or was wrong some time ago."""
        settled = self._verdict.certain and self._verdict.lost is None
        if not settled and self._clock() >= self._again:
            self._verdict = await check_fields(self._client, self._headers)
            self._again = self._clock() + _AGAIN_SECONDS
        return self._verdict.lost


async def check_fields(client: RuntimeClient, headers: Mapping[str, str]) -> FieldsVerdict:
    """Send one request in each form whose fields are known to get lost."""
    verdicts = [await _check(client, path, headers) for path in (_GENERATE, _CHAT)]
    lost = next((verdict for verdict in verdicts if verdict.lost is not None), None)
    return lost or FieldsVerdict(None, certain=any(verdict.certain for verdict in verdicts))


async def _check(client: RuntimeClient, path: str, headers: Mapping[str, str]) -> FieldsVerdict:
    rid = f"winnow-probe-{uuid4().hex}"
    try:
        answer = await client.post(path, to_json(_request(path, rid)), _PATIENCE_SECONDS, headers)
    except RuntimeFailure:
        return _UNCERTAIN
    if answer.status_code == 400 and _REFUSED_FIELD in answer.content:
        return FieldsVerdict(None, certain=True)
    if answer.status_code != 200:
        return _UNCERTAIN
    try:
        reported: Any = from_json(answer.content)
    except ValueError:
        return _UNCERTAIN
    holder = reported.get("meta_info") if path == _GENERATE and isinstance(reported, dict) else reported
    same = isinstance(holder, dict) and holder.get("id") == rid
    if same and not await _has_winnow(client, headers):
        return FieldsVerdict(None, certain=True)
    fields = "custom_params" if same else "rid and custom_params"
    return FieldsVerdict(
        f"The upstream loses fields of {path}: {fields} of a request did not reach the runtime. Policies, and the cache"
        " salts of tenants, may be lost. Put a balancer there that passes requests on as they are (docs/operation.md,"
        " Several runtimes).",
        certain=True,
    )


async def _has_winnow(client: RuntimeClient, headers: Mapping[str, str]) -> bool:
    try:
        reported: Any = from_json((await client.get(_INFORMATION, _PATIENCE_SECONDS, headers)).content)
    except (RuntimeFailure, ValueError):
        return False
    return isinstance(reported, dict) and bool(reported.get("winnow"))


def _request(path: str, rid: str) -> dict[str, JsonValue]:
    if path == _GENERATE:
        return {"text": "a", "rid": rid, "sampling_params": {"max_new_tokens": 1, "custom_params": _PARAMETERS}}
    messages: JsonValue = [{"role": "user", "content": "a"}]
    return {"messages": messages, "rid": rid, "max_tokens": 1, "custom_params": _PARAMETERS}
