"""What a load test must keep to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """Bounds on a whole load test.

    Attributes:
        failure_ratio: requests that failed by requests.
        ttft_p95, tpot_p95: seconds, 95th percentiles over all requests that were answered.
    """

    failure_ratio: float
    ttft_p95: float
    tpot_p95: float


@dataclass(frozen=True)
class Outcome:
    """What came of a load test.

    Attributes:
        finished: complete answers of each kind of user.
        ttft_p95, tpot_p95: seconds; None if nothing was measured.
    """

    requests: int
    failures: int
    finished: dict[str, int]
    ttft_p95: float | None
    tpot_p95: float | None


def violations(outcome: Outcome, thresholds: Thresholds) -> list[str]:
    """Return in words what ``outcome`` does not keep to. What was not measured is not kept."""
    found = [f"no answer to a {kind} user was complete" for kind, count in outcome.finished.items() if not count]
    ratio = outcome.failures / outcome.requests if outcome.requests else 1.0
    if ratio > thresholds.failure_ratio:
        found.append(f"{ratio:.1%} of requests failed, more than {thresholds.failure_ratio:.1%}")
    found += _above("time to first token", outcome.ttft_p95, thresholds.ttft_p95)
    found += _above("time per output token", outcome.tpot_p95, thresholds.tpot_p95)
    return found


def _above(what: str, measured: float | None, bound: float) -> Iterable[str]:
    if measured is None:
        return [f"the {what} was not measured"]
    return [f"the {what} (95th percentile) is {measured:g} s, more than {bound:g} s"] if measured > bound else []
