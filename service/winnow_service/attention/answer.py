"""What a native answer tells of its attention, lifted to where the OpenAI forms have it.

SGLang gives a native answer's facts in ``meta_info``. Everything else in an answer stays as it came.
"""

from __future__ import annotations

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
    return b"\n".join(
        _DATA + lift_in_body(line.removeprefix(_DATA)) if line.startswith(_DATA) else line
        for line in events.split(b"\n")
    )


def _lift(answer: Any) -> bool:
    facts = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(facts, dict) or FIELD not in facts:
        return False
    answer[FIELD] = facts[FIELD]
    return True
