"""How much of the context the requests of a cell read, from the ``attention`` objects of their responses.

Each object gives one request's ratios. Over many requests the ratios are of sums, so each request counts with its own
denominator: the tokens in context, added up over decode steps or over prefilled queries. The sums over layers and KV
heads multiply every denominator of one model alike and cancel.

The shares that early termination and an estimating policy report have denominators that the objects do not give (tiles
selected, for one). They are weighted by the same tokens in context, which is exact where all requests are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from winnow_kernels.contract.attention_statistics import amount, decode_context, prefill_context, section

_Weighted = list[tuple[Mapping[str, Any], float]]


@dataclass(frozen=True)
class AttentionRatios:
    """All requests that carried an ``attention`` object; each number is None where no response reported it.

    Attributes:
        estimated_share: the attention mass that the policy believes to have attended.
        terminated_ratio: the part of (layer, KV head, step) whose traversal stopped early.
        skipped_ratio: tiles skipped by the tiles selected.
        cached_tokens: mean tokens of a prompt that were found cached.
    """

    decode_attended_ratio: float | None
    decode_kv_read_ratio: float | None
    prefill_attended_ratio: float | None
    prefill_kv_read_ratio: float | None
    estimated_share: float | None
    terminated_ratio: float | None
    skipped_ratio: float | None
    cached_tokens: float | None


def attention_ratios(objects: Iterable[Mapping[str, Any]]) -> AttentionRatios | None:
    """Combine the ``attention`` objects of several responses; None if there are none."""
    known = list(objects)
    if not known:
        return None
    decode = _weighted((section(each, "decode") for each in known), decode_context)
    prefill = _weighted((section(each, "prefill") for each in known), prefill_context)
    termination = [(section(phase, "early_termination"), weight) for phase, weight in decode]
    return AttentionRatios(
        decode_attended_ratio=_ratio(decode, "attended_ratio"),
        decode_kv_read_ratio=_ratio(decode, "kv_read_ratio"),
        prefill_attended_ratio=_ratio(prefill, "attended_ratio"),
        prefill_kv_read_ratio=_ratio(prefill, "kv_read_ratio"),
        estimated_share=_ratio(decode, "estimated_share"),
        terminated_ratio=_ratio(termination, "terminated_ratio"),
        skipped_ratio=_ratio(termination, "skipped_ratio"),
        cached_tokens=_ratio([(section(each, "prefill"), 1.0) for each in known], "cached_tokens"),
    )


def _weighted(sections: Iterable[Mapping[str, Any]], context: Callable[[Mapping[str, Any]], float]) -> _Weighted:
    return [(phase, weight) for phase in sections if (weight := context(phase)) > 0]


def _ratio(weighted: _Weighted, field: str) -> float | None:
    reported = [(number, weight) for phase, weight in weighted if (number := amount(phase, field)) is not None]
    if not reported:
        return None
    return sum(number * weight for number, weight in reported) / sum(weight for _, weight in reported)
