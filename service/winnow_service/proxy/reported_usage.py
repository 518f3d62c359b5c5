"""What answers report of themselves: their tokens, and what their attention cost.

A native answer reports it in ``meta_info``. An OpenAI answer has ``usage``, and ``attention`` in each choice; in a
stream both come at its end, ``attention`` as an object or a list of one for each choice. Responses and messages have
both at the top. In a stream the former have them in the ``response`` of the last event; the latter count the prompt in
the ``message`` of the first event, and the answer at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from winnow_kernels.contract.attention_statistics import Statistics, amount, section
from winnow_kernels.contract.request_body import FIELD


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
        costs.extend(_costs(section(answer, "response") or answer))
        usage = dict(usage) | dict(_usage(answer))
    costs.extend(cost for facts in native.values() if (cost := section(facts, FIELD)))
    counted = list(native.values()) or [usage]
    prompt = _sum(counted, "prompt_tokens", "input_tokens", "cache_read_input_tokens")
    output = _sum(counted, "completion_tokens", "output_tokens")
    return ReportedUsage(
        tuple(costs),
        _prompt_tokens(costs) if prompt is None else prompt,
        _output_tokens(costs) if output is None else output,
        None if prompt is None or output is None else prompt + output,
        events,
    )


def _usage(answer: Statistics) -> Statistics:
    inner = section(answer, "response") or section(answer, "message")
    return section(answer, "usage") or section(inner, "usage")


def _costs(answer: Statistics) -> list[Statistics]:
    choices = answer.get("choices")
    found = [choice.get(FIELD) for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    if not any(found):
        at_top = answer.get(FIELD)
        found = at_top if isinstance(at_top, list) else [at_top]
    return [cost for cost in found if isinstance(cost, dict)]


def _sum(counted: Iterable[Statistics], *names: str) -> int | None:
    known = [number for facts in counted for name in names if (number := amount(facts, name)) is not None]
    return int(sum(known)) if known else None


def _prompt_tokens(costs: Iterable[Statistics]) -> int | None:
    prefills = [section(cost, "prefill") for cost in costs]
    known = [tokens + (amount(each, "cached_tokens") or 0) for each in prefills if (tokens := amount(each, "tokens"))]
    return int(sum(known)) if known else None


def _output_tokens(costs: Iterable[Statistics]) -> int | None:
    # The first token of an answer comes of the prefill.
    known = [steps + 1 for cost in costs if (steps := amount(section(cost, "decode"), "steps")) is not None]
    return int(sum(known)) if known else None
