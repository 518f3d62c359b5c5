"""Choosing a request's policy: of the profile's the cheapest that keeps the quality at the length of its prompt.

- Between two lengths that were measured a policy loses what it loses at the worse of them, and reads what it reads at
  the one where it reads more. Below the shortest and beyond the longest nothing was measured: there it is dense.
- What counts is the worse end of an interval (``Point``), not the mean.
- A policy after a sparse prefill was measured after that prefill: its figures are of both together.
- The cost is that of decode steps, and that of the prefill of what the cache does not have of the prompt, both relative
  to dense attention. Half of a prefill's is taken as attention's, which a sparse one makes less of. So a request
  goes on in the part of the cache that has most of it, unless about half of its prompt is new.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglang_winnow.quality_profile import Curve, Point
from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.quality import Quality

ATTENTION_OF_PREFILL: Final = 0.5
"""The part of a prefill's cost that a sparse prefill makes less of."""
_DENSE: Final = AttentionPolicy()


@dataclass(frozen=True)
class Expected:
    """What the profile says of a policy at a length.

    Attributes:
        kl: in nats, at most.
        top1: at least.
        kv_read_ratio: of decode steps.
        prefill_kv_read_ratio: of the prefill.
    """

    kl: float
    top1: float
    kv_read_ratio: float
    prefill_kv_read_ratio: float

    def keeps(self, kl: float | None, top1: float | None) -> bool:
        """Return whether it is within the bounds that there are."""
        return (kl is None or self.kl <= kl) and (top1 is None or self.top1 >= top1)

    def cost(self, length: int, cached: int) -> float:
        """Return what a prompt of ``length`` tokens, ``cached`` of them in the cache, and its decode steps cost."""
        computed = (length - min(cached, length)) / length
        attention = ATTENTION_OF_PREFILL * self.prefill_kv_read_ratio
        return computed * (1 - ATTENTION_OF_PREFILL + attention) + self.kv_read_ratio


AS_DENSE: Final = Expected(kl=0.0, top1=1.0, kv_read_ratio=1.0, prefill_kv_read_ratio=1.0)


@dataclass(frozen=True)
class Choice:
    """The policy of a request that left it to the server.

    Attributes:
        policy: what it gets.
        kl: the bound on KL that it was chosen by; None if there was none.
        top1: the same of ``top1``.
        length: tokens of the prompt.
        lengths: the measured lengths around it; none where nothing was measured.
        expected: what the profile says of the policy there.
    """

    policy: AttentionPolicy
    kl: float | None
    top1: float | None
    length: int
    lengths: tuple[int, ...]
    expected: Expected

    @property
    def warnings(self) -> list[str]:
        """What the client should know of the choice."""
        if self.lengths:
            return []
        problem = f"quality: the profile has no figures for a prompt of {self.length} tokens, so attention is dense"
        return [f"{problem}; winnow calibrate profile --lengths measures other lengths"]

    def told(self) -> dict[str, Any]:
        """Return what the answer says of it."""
        expected = self.expected
        return {
            "kl": self.kl,
            "top1": self.top1,
            "chosen": self.policy.model_dump(mode="json", exclude_none=True),
            "measured_lengths": list(self.lengths),
            "expected": {
                "kl": round(expected.kl, 6),
                "top1": round(expected.top1, 6),
                "kv_read_ratio": round(expected.kv_read_ratio, 6),
                "prefill_kv_read_ratio": round(expected.prefill_kv_read_ratio, 6),
            },
        }


def choose(
    quality: Quality,
    length: int,
    curves: Sequence[Curve],
    lengths: Sequence[int],
    *,
    default_kl: float,
    cached: Callable[[AttentionPolicy], int],
    dense_until: Callable[[AttentionPolicy], int],
) -> Choice:
    """Return the cheapest policy that keeps a quality.

    Args:
        quality: what is asked for.
        length: tokens of the prompt.
        curves: of the policies to choose from.
        lengths: that were measured, ascending.
        default_kl: the bound where ``quality`` has none.
        cached: tokens of the prompt that are in the cache for requests with a policy.
        dense_until: the context length up to which the steps of a policy run dense on this machine.

    Raises:
        PolicyError: of the policies that ``quality`` allows none keeps it.
    """
    kl = default_kl if quality.kl is None and quality.top1 is None else quality.kl
    around = measured_around(length, lengths)
    found = [(_DENSE, AS_DENSE)] if _is_allowed(_DENSE, quality) else []
    for curve in curves if around else ():
        policy = curve.attention
        if not _is_allowed(policy, quality):
            continue
        expected = expected_of(curve, curves, around)
        runs_sparsely = policy.decode.policy == "dense" or length > dense_until(policy)
        if expected is not None and runs_sparsely and expected.keeps(kl, quality.top1):
            found.append((policy, expected))
    if not found:
        raise PolicyError(
            "attention.quality",
            f"no policy within the bounds keeps it at {length} tokens; allow dense, or ask for less",
        )
    prefills = {policy.prefill for policy, _ in found}
    # A look into the cache costs time, and tells nothing where all find the same there.
    of_prefill = {prefill: cached(AttentionPolicy(prefill=prefill)) if len(prefills) > 1 else 0 for prefill in prefills}
    policy, expected = min(
        found, key=lambda each: (each[1].cost(length, of_prefill[each[0].prefill]), each[0].canonical())
    )
    return Choice(policy, kl, quality.top1, length, around, expected)


def measured_around(length: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the measured length that a prompt has, or the two around it; none if it is not between two."""
    if not lengths or not lengths[0] <= length <= lengths[-1]:
        return ()
    return tuple(dict.fromkeys((lengths[bisect_right(lengths, length) - 1], lengths[bisect_left(lengths, length)])))


def expected_of(curve: Curve, curves: Sequence[Curve], lengths: Sequence[int]) -> Expected | None:
    """Return the worst that a policy does at some lengths; None if it was not measured at one of them."""
    points = _points(curve, lengths)
    if points is None:
        return None
    reads = max(point.kv_read_ratio for point in points)
    kl, top1 = max(point.kl_high for point in points), min(point.top1_low for point in points)
    policy = curve.attention
    if policy.decode.policy == "dense" and not policy.has_dense_prefill:
        return Expected(kl, top1, 1.0, reads)
    if policy.has_dense_prefill:
        return Expected(kl, top1, reads, 1.0)
    alone = AttentionPolicy(prefill=policy.prefill)
    of_prefill = next((_points(each, lengths) for each in curves if each.attention == alone), None)
    if of_prefill is None:
        return None
    return Expected(kl, top1, reads, max(point.kv_read_ratio for point in of_prefill))


def _points(curve: Curve, lengths: Sequence[int]) -> list[Point] | None:
    points = [curve.at(length) for length in lengths]
    found = [point for point in points if point is not None]
    return found if len(found) == len(points) else None


def _is_allowed(policy: AttentionPolicy, quality: Quality) -> bool:
    if quality.within is None:
        return True
    return quality.within.allow(policy.decode, policy.prefill, policy.model_dump(mode="json", exclude_none=True))
