"""What one request is charged to the limits of its key: reserved before it is sent, settled when it has ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
from fastapi import Response
from starlette.types import Receive, Scope, Send

from winnow_service.errors import InvalidField, RateLimited
from winnow_service.keys.keyring import Caller
from winnow_service.limits.limiter import Limiter, Reservation
from winnow_service.metrics.instruments import Metrics
from winnow_service.proxy.body import Form
from winnow_service.proxy.estimate import Estimate, estimate
from winnow_service.proxy.reported_usage import ReportedUsage

_OK = 200
# What bounds an answer in a form where it is not ``max_tokens``.
_LONGEST_ANSWER = {Form.NATIVE: "max_new_tokens", Form.RESPONSES: "max_output_tokens"}


@dataclass(frozen=True)
class Charge:
    """A reservation that ``settle`` must end.

    Attributes:
        estimate: of its tokens; None where no limit counts them.
    """

    limiter: Limiter
    reservation: Reservation
    estimate: Estimate | None

    async def settle(self, tokens: int) -> None:
        """Charge ``tokens``."""
        # Also when the client has left, which cancels everything else.
        with anyio.CancelScope(shield=True):
            await self.limiter.settle(self.reservation, tokens)

    def used(self, status: int, usage: ReportedUsage) -> int:
        """Return how many tokens an answer took: by its own account, else as far as that can be said."""
        if self.estimate is None or status != _OK:
            return 0
        if usage.total_tokens is not None:
            return usage.total_tokens
        # A token for each event.
        return self.reservation.tokens if usage.events is None else self.estimate.prompt + usage.events


class SettlingResponse(Response):
    """A response, and what is done when it has been sent, or could not be."""

    def __init__(self, response: Response, settle: Callable[[], Awaitable[None]]) -> None:
        self._response = response
        self._settle = settle
        self.status_code = response.status_code
        self.raw_headers = response.raw_headers
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            await self._settle()


async def reserve(
    limiter: Limiter, metrics: Metrics, caller: Caller, body: Mapping[str, Any], form: Form
) -> Charge | None:
    """Reserve what the request with this ``body`` may use; None if its key has no limits.

    Raises:
        InvalidField: it may use more than any minute allows.
        RateLimited: a limit does not allow it now.
    """
    if caller.limits is None:
        return None
    estimated, tokens = None, 0
    if caller.limits.tokens_per_minute is not None:
        estimated = estimate(body, form)
        tokens = estimated.prompt + estimated.answers
        if tokens > caller.limits.tokens_per_minute:
            raise InvalidField(
                _LONGEST_ANSWER.get(form, "max_tokens"),
                f"the prompt (about {estimated.prompt} tokens) and the longest answer allowed are {tokens} tokens, more"
                f" than this key may use in a minute ({caller.limits.tokens_per_minute})",
                code="exceeds_limit",
            )
    try:
        reservation = await limiter.admit(caller.id, caller.limits, tokens)
    except RateLimited as refusal:
        for limit in refusal.members["violated-policies"]:
            metrics.limits_hit.labels(limit).inc()
        raise
    return Charge(limiter, reservation, estimated)
