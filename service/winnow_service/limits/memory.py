"""Limits of one process: for a service alone, and for each replica while Redis is away."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import uuid4

from winnow_service.limits.limiter import (
    BUCKET_SECONDS,
    BUCKETS,
    CONCURRENT,
    REQUESTS,
    TOKENS,
    Limiter,
    Limits,
    QuotaStatus,
    Reservation,
    judge,
    quotas,
    rate_limit_headers,
)


class _Window(Counter[int]):
    """What was used in the last minute, by bucket, the oldest first."""

    def used(self, now: float) -> int:
        oldest = int(now / BUCKET_SECONDS) - BUCKETS
        while self and (first := next(iter(self))) < oldest:
            del self[first]
        return self.total()

    def free_after(self, amount: int, now: float) -> float:
        """Seconds until ``amount`` of what is used is free again."""
        for bucket, used in self.items():
            amount -= used
            if amount <= 0:
                return (bucket + BUCKETS + 1) * BUCKET_SECONDS - now
        return 0.0


@dataclass
class _Use:
    windows: dict[str, _Window] = field(default_factory=lambda: {REQUESTS: _Window(), TOKENS: _Window()})
    leases: set[str] = field(default_factory=set)


class MemoryLimiter(Limiter):
    """Counts in this process alone.

    Args:
        clock: seconds that only go forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: defaultdict[str, _Use] = defaultdict(_Use)

    async def admit(self, key_id: str, limits: Limits, tokens: int) -> Reservation:
        now = self._clock()
        use = self._uses[key_id]
        statuses = [_status(use, limit, quota, needed, now) for limit, quota, needed in quotas(limits, tokens)]
        judge(statuses)
        bucket = int(now / BUCKET_SECONDS)
        use.windows[REQUESTS][bucket] += 1
        use.windows[TOKENS][bucket] += tokens
        lease = uuid4().hex
        use.leases.add(lease)
        return Reservation(key_id, lease, bucket, tokens, rate_limit_headers(statuses, admitted=True))

    async def settle(self, reservation: Reservation, tokens: int) -> None:
        use = self._uses[reservation.key_id]
        use.leases.discard(reservation.lease)
        window, more = use.windows[TOKENS], tokens - reservation.tokens
        window.used(self._clock())
        if reservation.bucket in window:
            window[reservation.bucket] += more
        elif more > 0:
            window[int(self._clock() / BUCKET_SECONDS)] += more


def _status(use: _Use, limit: str, quota: int, needed: int, now: float) -> QuotaStatus:
    if limit == CONCURRENT:
        return QuotaStatus(limit, quota, len(use.leases), needed)
    window = use.windows[limit]
    used = window.used(now)
    return QuotaStatus(
        limit,
        quota,
        used,
        needed,
        reset_seconds=window.free_after(used, now),
        wait_seconds=window.free_after(used + needed - quota, now) if used + needed > quota else 0.0,
    )
