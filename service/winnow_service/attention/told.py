"""What answers tell of themselves: their tokens, and what their attention cost.

A native answer tells it in ``meta_info``. An OpenAI answer has ``usage``, and ``attention`` in each choice; in a stream
both come at its end, ``attention`` as an object or a list of one for each choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json

from winnow_service.attention.request import FIELD

_ATTENTION: Final = f'"{FIELD}"'.encode()
# How a native event of an answer that has ended differs from those before.
_FINISHED: Final = b'"finish_reason":{'
_COUNTED: Final = b'"completion_tokens"'
_DATA: Final = b"data: "
# No context, and no sum over the steps of one request, is longer; what is not a number is not less.
_MOST: Final = 1e15

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Told:
    """What the answers to one request tell.

    Attributes:
        attention: of each answer that tells of it.
        prompt_tokens, output_tokens: of all answers; None if they do not tell.
    """

    attention: tuple[Facts, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def told_by_body(body: bytes) -> Told:
    """Return what a whole answer tells, or a list of them."""
    parsed = _parsed(body)
    return _told(enumerate(parsed if isinstance(parsed, list) else [parsed]))


class StreamTold:
    """Keeps those events of a stream that may tell something, unread."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        # Native events count on: the newest tells of an answer that was not completed, too.
        self._counted = b""

    def feed(self, events: bytes) -> None:
        """Take whole events, of one line each."""
        if _ATTENTION in events or _FINISHED in events:
            self._kept.append(events)
        if _COUNTED in events:
            self._counted = events

    def told(self) -> Told:
        """Return what all events told."""
        lines = (line for events in (*self._kept, self._counted) for line in events.split(b"\n"))
        answers = (_parsed(line.removeprefix(_DATA)) for line in lines if line.startswith(_DATA))
        return _told((answer.get("index", 0), answer) for answer in answers if isinstance(answer, dict))


def section(holder: Facts, name: str) -> Facts:
    """Return an object in ``holder``; an empty one if there is none."""
    found = holder.get(name)
    return found if isinstance(found, Mapping) else {}


def amount(facts: Facts, name: str) -> float | None:
    """Return a number that can be counted; None if there is none."""
    found = facts.get(name)
    if not isinstance(found, int | float) or isinstance(found, bool):
        return None
    return float(found) if 0 <= found <= _MOST else None


def decode_context(decode: Facts) -> float:
    """Tokens in context added up over decode steps; ``context_tokens`` is the context of the last step."""
    steps, last = amount(decode, "steps") or 0.0, amount(decode, "context_tokens") or 0.0
    return max(0.0, steps * last - steps * (steps - 1) / 2)


def prefill_context(prefill: Facts) -> float:
    """Tokens in causal context added up over the queries of ``tokens`` prefilled behind ``cached_tokens``."""
    tokens, cached = amount(prefill, "tokens") or 0.0, amount(prefill, "cached_tokens") or 0.0
    return tokens * cached + tokens * (tokens + 1) / 2


def _parsed(text: bytes) -> Any:
    try:
        return from_json(text)
    except ValueError:
        return None


def _told(answers: Iterable[tuple[object, Any]]) -> Told:
    native: dict[str, Facts] = {}
    costs: list[Facts] = []
    usage: Facts = {}
    for index, answer in answers:
        if not isinstance(answer, dict):
            continue
        if isinstance(answer.get("meta_info"), dict):
            native[str(index)] = answer["meta_info"]
            continue
        costs.extend(_costs(answer))
        usage = section(answer, "usage") or usage
    costs.extend(cost for facts in native.values() if (cost := section(facts, FIELD)))
    counted = list(native.values()) or [usage]
    prompt, output = _sum(counted, "prompt_tokens"), _sum(counted, "completion_tokens")
    return Told(
        tuple(costs),
        _prompt_tokens(costs) if prompt is None else prompt,
        _output_tokens(costs) if output is None else output,
    )


def _costs(answer: Facts) -> list[Facts]:
    choices = answer.get("choices")
    found = [choice.get(FIELD) for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    if not any(found):
        at_top = answer.get(FIELD)
        found = at_top if isinstance(at_top, list) else [at_top]
    return [cost for cost in found if isinstance(cost, dict)]


def _sum(counted: Iterable[Facts], name: str) -> int | None:
    known = [number for facts in counted if (number := amount(facts, name)) is not None]
    return int(sum(known)) if known else None


def _prompt_tokens(costs: Iterable[Facts]) -> int | None:
    prefills = [section(cost, "prefill") for cost in costs]
    known = [tokens + (amount(each, "cached_tokens") or 0) for each in prefills if (tokens := amount(each, "tokens"))]
    return int(sum(known)) if known else None


def _output_tokens(costs: Iterable[Facts]) -> int | None:
    # The first token of an answer comes of the prefill.
    known = [steps + 1 for cost in costs if (steps := amount(section(cost, "decode"), "steps")) is not None]
    return int(sum(known)) if known else None
