"""Admitting requests within the limits of a key: the interface, and the rule that every limiter follows.

A limit of N per minute admits at most N in any 60 seconds. Use is counted in buckets of half a second, and a bucket
counts until all of it is older than the window: a steady stream gets at least N in 60.5 seconds. Tokens are reserved
when a request is admitted, for its prompt as estimated and the longest answer it allows, and corrected when it ends.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from winnow_service.errors import RateLimited

WINDOW_SECONDS: Final = 60
BUCKET_SECONDS: Final = 0.5
BUCKETS: Final = int(WINDOW_SECONDS / BUCKET_SECONDS)

REQUESTS: Final = "requests"
TOKENS: Final = "tokens"
CONCURRENT: Final = "concurrent"
_IN_WORDS: Final = {REQUESTS: "requests per minute", TOKENS: "tokens per minute", CONCURRENT: "requests at once"}
# When another request of the key will end is not known.
_CONCURRENT_RETRY_SECONDS: Final = 1.0


class Limits(BaseModel):
    """Limits of one key over all replicas of the service. None is no limit.

    Attributes:
        requests_per_minute: generation requests in any 60 seconds.
        tokens_per_minute: tokens of prompts and answers in any 60 seconds.
        concurrent_requests: generation requests being answered at once.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    requests_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    concurrent_requests: Annotated[int, Field(ge=1, le=100_000)] | None = None


@dataclass(frozen=True)
class QuotaStatus:
    """How much of one of its quotas a key has used.

    Attributes:
        needed: what the request asks of it.
        reset_seconds: until all that is used now is free again.
        wait_seconds: until what is needed is free; 0 if it is.
    """

    limit: str
    quota: int
    used: int
    needed: int
    reset_seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def allows(self) -> bool:
        return self.used + self.needed <= self.quota


@dataclass(frozen=True)
class Reservation:
    """What an admitted request has reserved.

    Attributes:
        bucket: where its tokens were counted.
        tokens: how many were reserved.
        headers: the RateLimit fields of its answer.
    """

    key_id: str
    lease: str
    bucket: int
    tokens: int
    headers: dict[str, str]


class Limiter(ABC):
    """Counts what keys use."""

    @abstractmethod
    async def admit(self, key_id: str, limits: Limits, tokens: int) -> Reservation:
        """Count a request that may use ``tokens``, which ``settle`` must end.

        Raises:
            RateLimited: a limit does not allow it now; nothing was counted.
        """

    @abstractmethod
    async def settle(self, reservation: Reservation, tokens: int) -> None:
        """End an admitted request that has used ``tokens``."""

    async def run(self) -> None:
        """Do what must be done again and again while requests are being answered; ends when cancelled."""
        return


def quotas(limits: Limits, tokens: int) -> list[tuple[str, int, int]]:
    """Return each limit that there is, with its quota and what a request of ``tokens`` needs of it."""
    asked = (
        (REQUESTS, limits.requests_per_minute, 1),
        (TOKENS, limits.tokens_per_minute, tokens),
        (CONCURRENT, limits.concurrent_requests, 1),
    )
    return [(limit, quota, needed) for limit, quota, needed in asked if quota is not None]


def judge(statuses: Sequence[QuotaStatus]) -> None:
    """Refuse a request that a limit does not allow.

    Raises:
        RateLimited: for the limit that takes longest.
    """
    refusing = [status for status in statuses if not status.allows]
    if not refusing:
        return
    longest = max(refusing, key=_wait)
    seconds = max(1, math.ceil(_wait(longest)))
    message = f"The key's limit of {longest.quota} {_IN_WORDS[longest.limit]} is used up. Try again in {seconds} s."
    headers = {"retry-after": str(seconds), **rate_limit_headers(statuses)}
    raise RateLimited([status.limit for status in refusing], message, headers)


def rate_limit_headers(statuses: Sequence[QuotaStatus], *, admitted: bool = False) -> dict[str, str]:
    """Return the fields of draft-ietf-httpapi-ratelimit-headers.

    Args:
        admitted: whether what the request needs is used now.
    """
    if not statuses:
        return {}
    policies, left = [], []
    for status in statuses:
        is_window = status.limit != CONCURRENT
        policies.append(
            f'"{status.limit}";q={status.quota}'
            + (f";w={WINDOW_SECONDS}" if is_window else ';qu="concurrent-requests"')
        )
        remaining = max(0, status.quota - status.used - (status.needed if admitted else 0))
        reset = WINDOW_SECONDS if admitted else math.ceil(status.reset_seconds)
        left.append(f'"{status.limit}";r={remaining}' + (f";t={reset}" if is_window else ""))
    return {"ratelimit-policy": ", ".join(policies), "ratelimit": ", ".join(left)}


def _wait(status: QuotaStatus) -> float:
    return _CONCURRENT_RETRY_SECONDS if status.limit == CONCURRENT else status.wait_seconds
