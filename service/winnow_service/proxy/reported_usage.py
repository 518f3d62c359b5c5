"""What answers report of themselves: their tokens, and what their attention cost.

A native answer reports it in ``meta_info``. An OpenAI answer has ``usage``, and ``attention`` in each choice; in a
stream both come at its end, ``attention`` as an object or a list of one for each choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from winnow_service.proxy.attention_field import FIELD

# No context, and no sum over the steps of one request, is longer; what is not a number is not less.
_MAX_AMOUNT: Final = 1e15

Statistics = Mapping[str, Any]


@dataclass(frozen=True)
class ReportedUsage:
    """What the answers to one request report of themselves.

    Attributes:
        attention: the statistics of each answer that has them.
        prompt_tokens, output_tokens: of all answers; from the statistics where nothing else has them, None if that is
            not possible either.
        total_tokens: both, if the answers count them; None if not.
        events: how many events of a stream there were, without the one that ends it; None for a whole answer.
    """

    attention: tuple[Statistics, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    events: int | None = None


def reported_usage(answers: Iterable[tuple[object, Any]], events: int | None = None) -> ReportedUsage:
    """Return what ``answers``, or the events of a stream, report; each is parsed, and comes with its index."""
    native: dict[str, Statistics] = {}
    costs: list[Statistics] = []
    usage: Statistics = {}
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
    return ReportedUsage(
        tuple(costs),
        _prompt_tokens(costs) if prompt is None else prompt,
        _output_tokens(costs) if output is None else output,
        None if prompt is None or output is None else prompt + output,
        events,
    )


def section(holder: Statistics, name: str) -> Statistics:
    """Return an object in ``holder``; an empty one if there is none."""
    found = holder.get(name)
    return found if isinstance(found, Mapping) else {}


def amount(facts: Statistics, name: str) -> float | None:
    """Return a number that can be counted; None if there is none."""
    found = facts.get(name)
    if not isinstance(found, int | float) or isinstance(found, bool):
        return None
    return float(found) if 0 <= found <= _MAX_AMOUNT else None


def decode_context(decode: Statistics) -> float:
    """Tokens in context added up over decode steps; ``context_tokens`` is the context of the last step."""
    steps, last = amount(decode, "steps") or 0.0, amount(decode, "context_tokens") or 0.0
    return max(0.0, steps * last - steps * (steps - 1) / 2)


def prefill_context(prefill: Statistics) -> float:
    """Tokens in causal context added up over the queries of ``tokens`` prefilled behind ``cached_tokens``."""
    tokens, cached = amount(prefill, "tokens") or 0.0, amount(prefill, "cached_tokens") or 0.0
    return tokens * cached + tokens * (tokens + 1) / 2


def _costs(answer: Statistics) -> list[Statistics]:
    choices = answer.get("choices")
    found = [choice.get(FIELD) for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    if not any(found):
        at_top = answer.get(FIELD)
        found = at_top if isinstance(at_top, list) else [at_top]
    return [cost for cost in found if isinstance(cost, dict)]


def _sum(counted: Iterable[Statistics], name: str) -> int | None:
    known = [number for facts in counted if (number := amount(facts, name)) is not None]
    return int(sum(known)) if known else None


def _prompt_tokens(costs: Iterable[Statistics]) -> int | None:
    prefills = [section(cost, "prefill") for cost in costs]
    known = [tokens + (amount(each, "cached_tokens") or 0) for each in prefills if (tokens := amount(each, "tokens"))]
    return int(sum(known)) if known else None


def _output_tokens(costs: Iterable[Statistics]) -> int | None:
    # The first token of an answer comes of the prefill.
    known = [steps + 1 for cost in costs if (steps := amount(section(cost, "decode"), "steps")) is not None]
    return int(sum(known)) if known else None
