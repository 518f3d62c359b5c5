"""Limits of one process: for a service alone, and for each replica while Redis is away."""

from __future__ import annotations

import time
from collections import defaultdict
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
    Standing,
    Ticket,
    judge,
    quotas,
    rate_limit_headers,
)
from winnow_service.limits.limits import Limits


@dataclass
class _Window:
    """What was used in the last minute, by bucket, the oldest first."""

    buckets: dict[int, int] = field(default_factory=dict)

    def used(self, now: float) -> int:
        oldest = int(now / BUCKET_SECONDS) - BUCKETS
        while self.buckets and (first := next(iter(self.buckets))) < oldest:
            del self.buckets[first]
        return sum(self.buckets.values())

    def free_after(self, amount: int, now: float) -> float:
        """Seconds until ``amount`` of what is used is free again."""
        for bucket, used in self.buckets.items():
            amount -= used
            if amount <= 0:
                return (bucket + BUCKETS + 1) * BUCKET_SECONDS - now
        return 0.0

    def add(self, bucket: int, amount: int) -> None:
        self.buckets[bucket] = self.buckets.get(bucket, 0) + amount


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

    async def admit(self, key_id: str, limits: Limits, tokens: int) -> Ticket:
        now = self._clock()
        use = self._uses[key_id]
        standings = [_standing(use, limit, quota, needed, now) for limit, quota, needed in quotas(limits, tokens)]
        judge(standings)
        bucket = int(now / BUCKET_SECONDS)
        use.windows[REQUESTS].add(bucket, 1)
        use.windows[TOKENS].add(bucket, tokens)
        lease = uuid4().hex
        use.leases.add(lease)
        return Ticket(key_id, lease, bucket, tokens, rate_limit_headers(standings, admitted=True))

    async def settle(self, ticket: Ticket, tokens: int) -> None:
        use = self._uses[ticket.key_id]
        use.leases.discard(ticket.lease)
        window, more = use.windows[TOKENS], tokens - ticket.tokens
        window.used(self._clock())
        if ticket.bucket in window.buckets:
            window.add(ticket.bucket, more)
        elif more > 0:
            window.add(int(self._clock() / BUCKET_SECONDS), more)


def _standing(use: _Use, limit: str, quota: int, needed: int, now: float) -> Standing:
    if limit == CONCURRENT:
        return Standing(limit, quota, len(use.leases), needed)
    window = use.windows[limit]
    used = window.used(now)
    return Standing(
        limit,
        quota,
        used,
        needed,
        reset_seconds=window.free_after(used, now),
        wait_seconds=window.free_after(used + needed - quota, now) if used + needed > quota else 0.0,
    )
