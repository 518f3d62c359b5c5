"""Reading what answers report of their attention: the ``attention`` object of a response, from whatever server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# No context, and no sum over the steps of one request, is longer; what is not a number is not less.
_MAX_AMOUNT: Final = 1e15

Statistics = Mapping[str, Any]


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
