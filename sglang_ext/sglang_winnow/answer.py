"""What a request's attention cost, as the answer reports it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_winnow.audit_share import promised_share
from sglang_winnow.quality_choice import Choice
from winnow_kernels.decode.statistics import Field
from winnow_kernels.policies.attention_policy import AttentionPolicy


def answer(
    row: Tensor,
    policy: AttentionPolicy,
    cached_tokens: int,
    kept_tokens: int,
    released_tokens: int,
    retracted: int,
    sliding_layers: int | None,
    linear_layers: int | None,
    audited_share: float,
    choice: Choice | None = None,
) -> dict[str, Any]:
    """Return the ``attention`` object of a finished request.

    Args:
        row: float64 [fields], the request's row of the table, on the CPU.
        policy: what the request asked for.
        cached_tokens: tokens of its prompt that the radix cache held.
        kept_tokens: tokens of its answer whose KV, which is not dense, the radix cache holds from now on.
        released_tokens: tokens of its prompt that it gave back while it ran, if it asked to.
        retracted: how often the request was retracted and its generated tokens prefilled anew.
        sliding_layers: how many layers have a sliding window, and are in no ratio; None if it never ran.
        linear_layers: how many have linear attention, and are in no ratio, either; None likewise.
        audited_share: of its decode steps, as it or the server asked for.
        choice: how its policy was chosen; None if the request named it.
    """
    values = row.tolist()

    def count(field: Field) -> int:
        return int(values[field])

    def ratio(numerator: Field, denominator: Field) -> float | None:
        return round(values[numerator] / values[denominator], 6) if values[denominator] else None

    termination = None
    if policy.early_termination is not None:
        termination = {
            "terminated_ratio": ratio(Field.TERMINATED, Field.TRAVERSALS),
            "skipped_ratio": ratio(Field.SKIPPED_TILES, Field.TILES),
        }
    return {
        "decode": {
            "policy": policy.decode.policy,
            "steps": count(Field.STEPS),
            "dense_steps": count(Field.DENSE_STEPS),
            "capped_steps": count(Field.CAPPED_STEPS),
            "budget_effective": count(Field.BUDGET) or None,
            "context_tokens": count(Field.CONTEXT),
            "attended_ratio": ratio(Field.DECODE_ATTENDED, Field.DECODE_CONTEXT),
            "kv_read_ratio": ratio(Field.DECODE_READ_BYTES, Field.DECODE_CONTEXT_BYTES),
            "estimated_share": ratio(Field.ESTIMATED_SHARE, Field.ESTIMATES),
            "early_termination": termination,
            "kept_tokens": kept_tokens if policy.keeps_sparse_answer else None,
            "released_tokens": released_tokens if policy.decode.releases_prompt else None,
        },
        "audit": _audit(row, policy) if audited_share else None,
        "verify": None if policy.verify is None else _verification(row),
        "prefill": {
            "policy": policy.prefill.policy,
            "tokens": count(Field.PREFILL_TOKENS),
            "cached_tokens": cached_tokens,
            "attended_ratio": ratio(Field.PREFILL_ATTENDED, Field.PREFILL_CONTEXT),
            "kv_read_ratio": ratio(Field.PREFILL_READ_BYTES, Field.PREFILL_CONTEXT_BYTES),
        },
        "quality": None if choice is None else choice.told(),
        "sliding_layers": sliding_layers,
        "linear_layers": linear_layers,
        "index_built_tokens": count(Field.INDEX_BUILT_TOKENS),
        "retracted": retracted,
        "warnings": [*policy.warnings(), *([] if choice is None else choice.warnings)],
    }


def _audit(row: Tensor, policy: AttentionPolicy) -> dict[str, Any]:
    heads, compared = float(row[Field.AUDITED_HEADS]), float(row[Field.AUDITED_NEXT_TOKENS])

    def mean(field: Field) -> float | None:
        return round(float(row[field]) / heads, 6) if heads else None

    def of_next_token(field: Field) -> float | None:
        return round(float(row[field]) / compared, 9) if compared else None

    p = promised_share(policy.decode)
    return {
        "steps": int(row[Field.AUDITED_STEPS]),
        "true_share": mean(Field.AUDITED_SHARE),
        "output_error": mean(Field.AUDITED_ERROR),
        "p": p,
        "reached": None if p is None else mean(Field.AUDITED_REACHED),
        "next_token_kl": of_next_token(Field.AUDITED_KL),
        "top1": of_next_token(Field.AUDITED_TOP1),
    }


def trimmed(row: Tensor, steps: int) -> Tensor:
    """Return ``row`` without what came after the end of the answer: its last check may have come to more tokens.

    Args:
        row: float64 [fields], on the CPU.
        steps: that the answer's tokens took at most, decoded one by one.
    """
    counted, last = int(row[Field.STEPS]), float(row[Field.CONTEXT])
    beyond = counted - steps
    if beyond <= 0 or steps < 0:
        return row
    row = row.clone()
    row[Field.STEPS] = steps
    row[Field.CONTEXT] = last - beyond
    share = 1 - _contexts(last, beyond) / _contexts(last, counted)
    for field in (Field.DECODE_CONTEXT, Field.DECODE_CONTEXT_BYTES):
        row[field] *= share
    return row


def _contexts(last: float, steps: int) -> float:
    # Of the last steps, the contexts of which are one token longer each.
    return steps * last - steps * (steps - 1) / 2


def _verification(row: Tensor) -> dict[str, Any]:
    verifications, drafted, accepted, dense = (
        int(row[field]) for field in (Field.VERIFICATIONS, Field.DRAFTED, Field.ACCEPTED, Field.DENSE_STEPS)
    )
    return {
        "verifications": verifications,
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_verification": round(1 + accepted / verifications, 6) if verifications else None,
        "dense_steps": dense,
    }
