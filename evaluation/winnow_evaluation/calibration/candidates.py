"""Which policies a profile has curves of, unless the command names others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from winnow_evaluation.fidelity.policies import Measured, asked_for
from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy
from winnow_service.policies.presets import MIN_TOKENS

SHARES: Final = (0.75, 0.9, 0.95, 0.98)
BUDGETS: Final = (128, 256, 512, 1024, 2048, 4096)


def default_policies() -> list[AttentionPolicy]:
    """Return the decode policies that are measured by default.

    They are those that choose token by token at every step, as the presets do. Others are far from dense attention
    where something is looked up, which texts do not show.
    """
    decode: list[Mapping[str, Any]] = [{"policy": "lowbit_top_p", "p": p, "min_tokens": MIN_TOKENS} for p in SHARES]
    decode += [{"policy": "lowbit_top_k", "budget": budget} for budget in BUDGETS]
    return [parse_policy({"decode": one}) for one in decode]


def candidates(asked: Sequence[Mapping[str, Any] | str], prefill: Mapping[str, Any] | None) -> list[AttentionPolicy]:
    """Return the policies to measure: each after a dense prefill and after the sparse one, and the sparse one alone.

    Args:
        asked: decode policies, as requests write them, or names of presets; none for ``default_policies``.
        prefill: the sparse prefill; None for dense prefill alone.

    Raises:
        PolicyError: one is no policy, or has what a profile has no place for.
    """
    decodes = [measured.policy for measured in asked_for(asked)] if asked else default_policies()
    for policy in decodes:
        if not policy.has_dense_prefill:
            raise PolicyError("attention.prefill", "must be absent: --prefill says which prefill is measured")
        if policy.verify is not None or policy.keep or policy.audit or policy.decode.releases_prompt:
            raise PolicyError("attention", "must be without verify, keep, audit and release")
    sparse = None if prefill is None else parse_policy({"prefill": prefill})
    found = list(decodes)
    if sparse is not None and not sparse.has_dense_prefill:
        found.append(sparse)
        found += [policy.model_copy(update={"prefill": sparse.prefill}) for policy in decodes]
    return _each_once(policy for policy in found if not policy.is_dense)


def fits(policy: AttentionPolicy, length: int) -> bool:
    """Return whether a policy leaves something out of a prompt of ``length`` tokens: its budget does not hold it."""
    budgets = (getattr(each, "budget", None) for each in (policy.decode, policy.prefill))
    window = getattr(policy.decode, "window", None)
    return all(budget is None or budget < length for budget in (*budgets, window))


def measured_of(policies: Iterable[AttentionPolicy]) -> list[Measured]:
    """Return policies as the engine takes them."""
    return [Measured(policy) for policy in policies]


def _each_once(policies: Iterable[AttentionPolicy]) -> list[AttentionPolicy]:
    return list({policy.canonical(): policy for policy in policies}.values())
