"""Choosing a request's policy: of the profile's the cheapest that keeps the quality at the length of its prompt.

- Between two lengths that were measured a policy loses what it loses at the worse of them, and reads what it reads at
  the one where it reads more. Below the shortest and beyond the longest nothing was measured: there it is dense.
- What counts is the worse end of an interval (``Point``), not the mean.
- A policy after a sparse prefill was measured after that prefill: its figures are of both together.
- A policy that audits showed to break its promise was left (``left_policies``): the next one is chosen, dense decoding
  as the last. Where the next one needs another prefill, dense decoding after the prefill of the one that was left is
  as near to dense attention as that was, and a conversation goes on in its part of the cache.
- Under load the decode policy may be one that keeps a lower quality. The prefill stays what it is without load, so that
  load parts no cache.
- The cost is that of decode steps, and that of the prefill of what the cache does not have of the prompt, both relative
  to dense attention. Half of a prefill's is taken as attention's, which a sparse one makes less of. So a request
  goes on in the part of the cache that has most of it, unless about half of its prompt is new.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sglang_winnow.audit_share import promised_share
from sglang_winnow.quality_profile import Curve, Point
from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.quality import Quality

if TYPE_CHECKING:
    # It counts in metrics, which need SGLang; offline measurements do without.
    from sglang_winnow.left_policies import Left

ATTENTION_OF_PREFILL: Final = 0.5
"""The part of a prefill's cost that a sparse prefill makes less of."""
_DENSE: Final = AttentionPolicy()


class QualityBound(NamedTuple):
    """How near to dense attention an answer must be: the highest KL in nats, the lowest ``top1``; None for no bound."""

    kl: float | None
    top1: float | None


@dataclass(frozen=True)
class Expected:
    """What the profile says of a policy at a length.

    Attributes:
        kl: in nats, at most.
        top1: at least.
        kv_read_ratio: of decode steps.
        prefill_kv_read_ratio: of the prefill.
        true_share: of the attention, held by decode steps; None if they are dense, or it was not measured.
    """

    kl: float
    top1: float
    kv_read_ratio: float
    prefill_kv_read_ratio: float
    true_share: float | None = None

    def keeps(self, bound: QualityBound) -> bool:
        """Return whether it is within a bound."""
        return (bound.kl is None or self.kl <= bound.kl) and (bound.top1 is None or self.top1 >= bound.top1)

    def cost(self, length: int, cached: int) -> float:
        """Return what a prompt of ``length`` tokens, ``cached`` of them in the cache, and its decode steps cost."""
        computed = (length - min(cached, length)) / length
        attention = ATTENTION_OF_PREFILL * self.prefill_kv_read_ratio
        return computed * (1 - ATTENTION_OF_PREFILL + attention) + self.kv_read_ratio


AS_DENSE: Final = Expected(kl=0.0, top1=1.0, kv_read_ratio=1.0, prefill_kv_read_ratio=1.0)


class LoweredBound(NamedTuple):
    """The lower quality that sufficed for a request, and how many other requests the server had."""

    bound: QualityBound
    requests: int


@dataclass(frozen=True)
class Choice:
    """The policy of a request that left it to the server.

    Attributes:
        policy: what it gets.
        bound: that holds without load.
        length: tokens of the prompt.
        lengths: the measured lengths around it; none where nothing was measured.
        expected: what the profile says of the policy there.
        under_load: the lower quality that it was chosen by; None if it keeps ``bound``.
        left: policies that would keep the quality, and were not chosen from.
    """

    policy: AttentionPolicy
    bound: QualityBound
    length: int
    lengths: tuple[int, ...]
    expected: Expected
    under_load: LoweredBound | None = None
    left: tuple[Left, ...] = ()

    @property
    def promised_share(self) -> float | None:
        """The share of the attention that its decode steps must hold: the profile's, or ``p`` where that is more.

        Nothing holds ``p`` that is cut by ``max_tokens`` or terminated early. None if nothing is promised.
        """
        is_cut = getattr(self.policy.decode, "max_tokens", None) is not None
        p = None if is_cut or self.policy.early_termination is not None else promised_share(self.policy.decode)
        return max((share for share in (p, self.expected.true_share) if share is not None), default=None)

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
        lowered = self.under_load
        return {
            "kl": self.bound.kl,
            "top1": self.bound.top1,
            "under_load": None if lowered is None else lowered.bound._asdict() | {"requests": lowered.requests},
            "chosen": self.policy.model_dump(mode="json", exclude_none=True),
            "measured_lengths": list(self.lengths),
            "expected": {
                "kl": round(expected.kl, 6),
                "top1": round(expected.top1, 6),
                "kv_read_ratio": round(expected.kv_read_ratio, 6),
                "prefill_kv_read_ratio": round(expected.prefill_kv_read_ratio, 6),
                "true_share": None if expected.true_share is None else round(expected.true_share, 6),
            },
            "left": [left.told() for left in self.left],
        }


Candidate = tuple[AttentionPolicy, Expected]


def choose(
    quality: Quality,
    length: int,
    curves: Sequence[Curve],
    lengths: Sequence[int],
    *,
    default_kl: float,
    cached: Callable[[AttentionPolicy], int],
    dense_until: Callable[[AttentionPolicy], int],
    left: Callable[[AttentionPolicy], Left | None] = lambda _: None,
    load: int | None = None,
    under_load_kl: float | None = None,
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
        left: why a policy is not to be chosen; None if it may be.
        load: how many other requests the server has if it is under load; None if it is not.
        under_load_kl: the bound under load where ``quality`` has none; None if it stays.

    Raises:
        PolicyError: of the policies that ``quality`` allows none keeps it.
    """
    bound = QualityBound(default_kl if quality.kl is None and quality.top1 is None else quality.kl, quality.top1)
    around = measured_around(length, lengths)
    known = [
        (policy, expected)
        for policy, expected in ((curve.attention, expected_of(curve, curves, around)) for curve in curves if around)
        if expected is not None and (policy.decode.policy == "dense" or length > dense_until(policy))
    ]
    known = [(_DENSE, AS_DENSE), *known]
    candidates, not_chosen = _keeping(bound, known, quality, left)
    if not candidates:
        raise PolicyError("attention.quality", _nothing_keeps_it(length, not_chosen))
    prefills = {policy.prefill for policy, _ in candidates}
    # A look into the cache costs time, and tells nothing where all find the same there.
    of_prefill = {prefill: cached(AttentionPolicy(prefill=prefill)) if len(prefills) > 1 else 0 for prefill in prefills}

    def cost(candidate: Candidate) -> tuple[float, str]:
        policy, expected = candidate
        return expected.cost(length, of_prefill[policy.prefill]), policy.canonical()

    policy, expected = min(candidates, key=cost)
    choice = Choice(policy, bound, length, around, expected, left=not_chosen)
    lower = _lower_bound(quality, bound, under_load_kl)
    if load is None or lower is None:
        return choice
    candidates, not_chosen = _keeping(lower, known, quality, left)
    cheapest = min((each for each in candidates if each[0].prefill == policy.prefill), key=cost)
    if cost(cheapest)[0] >= cost((policy, expected))[0]:
        return choice
    policy, expected = cheapest
    return replace(choice, policy=policy, expected=expected, under_load=LoweredBound(lower, load), left=not_chosen)


def _keeping(
    bound: QualityBound,
    known: Sequence[Candidate],
    quality: Quality,
    why_left: Callable[[AttentionPolicy], Left | None],
) -> tuple[list[Candidate], tuple[Left, ...]]:
    """Return the policies that keep a bound and may be chosen, and those that were left.

    Dense decoding after the prefill of a policy that was left takes its place.
    """
    found: dict[AttentionPolicy, Expected] = {}
    left: dict[AttentionPolicy, Left] = {}
    for policy, expected in known:
        if not (expected.keeps(bound) and _is_allowed(policy, quality)):
            continue
        if (why := why_left(policy)) is None:
            found[policy] = expected
            continue
        left[why.policy] = why
        densely = AttentionPolicy(prefill=policy.prefill)
        if not policy.has_dense_prefill and _is_allowed(densely, quality):
            found.setdefault(densely, replace(expected, kv_read_ratio=1.0, true_share=None))
    return list(found.items()), tuple(left.values())


def _lower_bound(quality: Quality, bound: QualityBound, under_load_kl: float | None) -> QualityBound | None:
    """Return what suffices under load; None for what suffices without."""
    lower = quality.under_load
    if lower is None:
        is_named = quality.kl is not None or quality.top1 is not None
        return None if is_named or under_load_kl is None else QualityBound(under_load_kl, None)
    # The server's own bound may be looser than what a request names for load.
    kl = bound.kl if lower.kl is None or bound.kl is None else max(bound.kl, lower.kl)
    return QualityBound(kl, bound.top1 if lower.top1 is None else lower.top1)


def _nothing_keeps_it(length: int, left: Sequence[Left]) -> str:
    names = ", ".join(sorted({each.policy.decode.policy for each in left}))
    because = f" (audits showed that {names} breaks its promise, so it was left)" if left else ""
    return f"no policy within the bounds keeps it at {length} tokens{because}; allow dense, or ask for less"


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
    shares = [point.true_share for point in points if point.true_share is not None]
    share = min(shares) if len(shares) == len(points) else None
    policy = curve.attention
    if policy.decode.policy == "dense" and not policy.has_dense_prefill:
        return Expected(kl, top1, 1.0, reads)
    if policy.has_dense_prefill:
        return Expected(kl, top1, reads, 1.0, share)
    alone = AttentionPolicy(prefill=policy.prefill)
    of_prefill = next((_points(each, lengths) for each in curves if each.attention == alone), None)
    if of_prefill is None:
        return None
    return Expected(kl, top1, reads, max(point.kv_read_ratio for point in of_prefill), share)


def _points(curve: Curve, lengths: Sequence[int]) -> list[Point] | None:
    points = [curve.at(length) for length in lengths]
    found = [point for point in points if point is not None]
    return found if len(found) == len(points) else None


def _is_allowed(policy: AttentionPolicy, quality: Quality) -> bool:
    if quality.within is None:
        return True
    return quality.within.allow(policy.decode, policy.prefill, policy.model_dump(mode="json", exclude_none=True))
