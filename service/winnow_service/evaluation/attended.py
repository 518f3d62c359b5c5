"""How much of the context the requests of a cell read, from the ``attention`` objects of their responses.

Each object gives one request's ratios. Over many requests the ratios are of sums, so each request counts with its own
denominator: the tokens in context, added up over decode steps or over prefilled queries. The sums over layers and KV
heads multiply every denominator of one model alike and cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PhaseRatios:
    """Ratios of sums over requests, of one phase (decode or prefill); None where no request told."""

    attended: float | None
    kv_read: float | None


@dataclass(frozen=True)
class AttentionRatios:
    """Both phases of all requests that carried an ``attention`` object."""

    decode: PhaseRatios
    prefill: PhaseRatios


def attention_ratios(objects: Iterable[Mapping[str, Any]]) -> AttentionRatios | None:
    """Combine the ``attention`` objects of several responses; None if there are none."""
    known = list(objects)
    if not known:
        return None
    return AttentionRatios(
        decode=_phase_ratios((_section(each, "decode") for each in known), _decode_context),
        prefill=_phase_ratios((_section(each, "prefill") for each in known), _prefill_context),
    )


def _section(attention: Mapping[str, Any], phase: str) -> Mapping[str, Any]:
    section = attention.get(phase)
    return section if isinstance(section, Mapping) else {}


def _phase_ratios(sections: Iterable[Mapping[str, Any]], context: Callable[[Mapping[str, Any]], float]) -> PhaseRatios:
    weighted = [(section, weight) for section in sections if (weight := context(section)) > 0]
    return PhaseRatios(attended=_ratio(weighted, "attended_ratio"), kv_read=_ratio(weighted, "kv_read_ratio"))


def _ratio(weighted: list[tuple[Mapping[str, Any], float]], field: str) -> float | None:
    told = [(number, weight) for section, weight in weighted if (number := _number(section, field)) is not None]
    if not told:
        return None
    return sum(number * weight for number, weight in told) / sum(weight for _, weight in told)


def _number(section: Mapping[str, Any], field: str) -> float | None:
    number = section.get(field)
    return float(number) if isinstance(number, int | float) and not isinstance(number, bool) else None


def _decode_context(decode: Mapping[str, Any]) -> float:
    """Tokens in context added up over decode steps; ``context_tokens`` is the context of the last step."""
    steps, last = _number(decode, "steps"), _number(decode, "context_tokens")
    return 0.0 if steps is None or last is None else steps * last - steps * (steps - 1) / 2


def _prefill_context(prefill: Mapping[str, Any]) -> float:
    """Tokens in causal context added up over the queries of ``tokens`` prefilled behind ``cached_tokens``."""
    tokens, cached = _number(prefill, "tokens"), _number(prefill, "cached_tokens") or 0.0
    return 0.0 if tokens is None else tokens * cached + tokens * (tokens + 1) / 2
