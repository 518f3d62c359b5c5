"""What a native answer tells of its attention, lifted to where the OpenAI forms have it.

SGLang gives a native answer's facts in ``meta_info``. Everything else in an answer stays as it came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import from_json, to_json

from winnow_service.attention.request import FIELD

# In a JSON text, quotation marks around a word of a string have backslashes: this can only be a member's name.
_MARK = f'"{FIELD}"'.encode()
_DATA = b"data: "


def lift_in_body(body: bytes) -> bytes:
    """Return a whole native answer, or a list of them, with ``meta_info.attention`` also at the top level."""
    if _MARK not in body:
        return body
    try:
        answers = from_json(body)
    except ValueError:
        return body
    lifted = [_lift(answer) for answer in (answers if isinstance(answers, list) else [answers])]
    if not any(lifted):
        return body
    return to_json(answers, inf_nan_mode="constants")


def lift_in_events(events: bytes) -> bytes:
    """Return whole server-sent events, of one line each, with ``meta_info.attention`` also at the top level."""
    if _MARK not in events:
        return events
    return _each_event(events, lift_in_body)


def warn_in_body(body: bytes, warnings: Sequence[str]) -> bytes:
    """Return a whole answer with ``warnings`` among those of each ``attention`` in it."""
    if _MARK not in body:
        return body
    try:
        answers = from_json(body)
    except ValueError:
        return body
    for answer in answers if isinstance(answers, list) else [answers]:
        _warn(answer, warnings)
    return to_json(answers, inf_nan_mode="constants")


def warn_in_events(events: bytes, warnings: Sequence[str]) -> bytes:
    """Return whole server-sent events, of one line each, with ``warnings`` as in ``warn_in_body``."""
    if _MARK not in events:
        return events
    return _each_event(events, lambda body: warn_in_body(body, warnings))


def _each_event(events: bytes, rewrite: Callable[[bytes], bytes]) -> bytes:
    return b"\n".join(
        _DATA + rewrite(line.removeprefix(_DATA)) if line.startswith(_DATA) else line for line in events.split(b"\n")
    )


def _warn(answer: Any, warnings: Sequence[str]) -> None:
    """Add ``warnings`` wherever a native or an OpenAI answer tells of attention."""
    if not isinstance(answer, dict):
        return
    told = answer.get(FIELD)
    for facts in told if isinstance(told, list) else [told]:
        if isinstance(facts, dict):
            known = facts.get("warnings")
            facts["warnings"] = [*(known if isinstance(known, list) else []), *warnings]
    for holder in (answer.get("meta_info"), *_list(answer.get("choices"))):
        _warn(holder, warnings)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _lift(answer: Any) -> bool:
    facts = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(facts, dict) or FIELD not in facts:
        return False
    answer[FIELD] = facts[FIELD]
    return True
