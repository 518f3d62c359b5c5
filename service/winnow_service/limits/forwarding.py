"""Forwarding requests that generate: in their turn, with the caller's policy, within the caller's limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from winnow_service.admission.queue import AdmissionQueue, Place
from winnow_service.attention.answer import warn_in_body, warn_in_events
from winnow_service.attention.request import FIELD, Form
from winnow_service.errors import ClientDisconnected, InvalidField, RateLimited
from winnow_service.forwarding import Forwarder
from winnow_service.keys.keyring import ANYONE, Caller
from winnow_service.limits.limiter import Limiter, Ticket
from winnow_service.limits.limits import Limits
from winnow_service.limits.usage import Estimate, StreamUsage, estimate, used_tokens
from winnow_service.policies.choice import Choice, choose
from winnow_service.policies.registry import PolicyRegistry
from winnow_service.request_body import JsonBody, read_json_object
from winnow_service.request_log import request_facts
from winnow_service.runtime.failures import RequestTimeout
from winnow_service.streaming import EventStreamResponse

_WARNING = "winnow-warning"


@dataclass(frozen=True)
class GovernedForwarder(Forwarder):
    """Forwards what callers may send."""

    registry: PolicyRegistry
    limiter: Limiter
    queue: AdmissionQueue

    async def generate_for(self, caller: Caller, request: Request, form: Form) -> Response:
        """Forward a request that may ask for policies. Without any, the runtime gets the very bytes that were sent.

        Raises:
            InvalidPolicy, PolicyForbidden, RateLimited, KeyQueueFull, QueueFull, QueueTimeout, Draining: the runtime
                has not seen the request.
        """
        body = await read_json_object(request, self.settings.max_body_bytes)
        choice = choose(body.members, form, self.registry, caller.default_policy, caller.bounds)
        facts = request_facts(request.scope)
        facts.key_id = None if caller is ANYONE else caller.id
        if isinstance(asked := body.members.get(FIELD), str):
            facts.policy_name = asked
        place = self.queue.join(None if caller is ANYONE else caller.id)
        try:
            return await self._limited(caller, choice, place, request, form, body)
        except BaseException:
            place.leave()
            raise

    async def _limited(
        self, caller: Caller, choice: Choice, place: Place, request: Request, form: Form, body: JsonBody
    ) -> Response:
        if caller.limits is None:
            return await self._generate_as(choice, place, request, form, body)
        counted = _counted(caller.limits, body.members, form)
        reserved = 0 if counted is None else counted.prompt + counted.answers
        try:
            ticket = await self.limiter.admit(caller.id, caller.limits, reserved)
        except RateLimited as refusal:
            for limit in refusal.members["violated-policies"]:
                self.metrics.limits_hit.labels(limit).inc()
            raise
        try:
            response = await self._generate_as(choice, place, request, form, body)
        except BaseException as error:
            # What the runtime has begun is not free because its client does not wait for the end.
            given_up = place.runs and isinstance(error, ClientDisconnected | RequestTimeout)
            await self._settle(ticket, ticket.tokens if given_up else 0)
            raise
        response.headers.update(ticket.headers)
        return self._settling(response, ticket, counted)

    async def _generate_as(
        self, choice: Choice, place: Place, request: Request, form: Form, body: JsonBody
    ) -> Response:
        answering = self._in_turn(choice, place, request, form, body)
        response = await self._unless_client_leaves(request, answering)
        return _with_warnings(response, choice.warnings) if choice.warnings else response

    async def _in_turn(self, choice: Choice, place: Place, request: Request, form: Form, body: JsonBody) -> Response:
        """Answer when it is the turn of ``place``, which is left when the runtime has done its part."""
        await place.turn()
        response = await self._generate(request, form, body, choice.policies)
        if isinstance(response, EventStreamResponse):
            response.on_end = place.leave
        else:
            place.leave()
        return response

    def _settling(self, response: Response, ticket: Ticket, counted: Estimate | None) -> Response:
        """Return ``response``, which settles what it took when it has been sent, or could not be."""
        if counted is None or response.status_code != 200:
            return _Settling(response, lambda: self._settle(ticket, 0))
        if not isinstance(response, StreamingResponse):
            used = used_tokens(bytes(response.body))
            return _Settling(response, lambda: self._settle(ticket, ticket.tokens if used is None else used))
        usage = StreamUsage(counted)
        response.body_iterator = _rewritten(response.body_iterator, usage.feed)
        return _Settling(response, lambda: self._settle(ticket, usage.tokens))

    async def _settle(self, ticket: Ticket, tokens: int) -> None:
        # Also when the client has left, which cancels everything else.
        with anyio.CancelScope(shield=True):
            await self.limiter.settle(ticket, tokens)


class _Settling(Response):
    """A response, and what is done when it has ended."""

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


def _counted(limits: Limits, body: Mapping[str, Any], form: Form) -> Estimate | None:
    """Return what the request may use; None where no limit counts it.

    Raises:
        InvalidField: it may use more than any minute allows.
    """
    if limits.tokens_per_minute is None:
        return None
    estimated = estimate(body, form)
    needed = estimated.prompt + estimated.answers
    if needed > limits.tokens_per_minute:
        raise InvalidField(
            "max_new_tokens" if form is Form.NATIVE else "max_tokens",
            f"the prompt (about {estimated.prompt} tokens) and the longest answer allowed are {needed} tokens, more"
            f" than this key may use in a minute ({limits.tokens_per_minute})",
            code="exceeds_limit",
        )
    return estimated


def _with_warnings(response: Response, warnings: tuple[str, ...]) -> Response:
    for warning in warnings:
        response.headers.append(_WARNING, warning)
    if isinstance(response, StreamingResponse):
        response.body_iterator = _rewritten(response.body_iterator, lambda events: warn_in_events(events, warnings))
    else:
        response.body = warn_in_body(bytes(response.body), warnings)
        response.headers["content-length"] = str(len(response.body))
    return response


async def _rewritten(events: Any, rewrite: Callable[[bytes], bytes]) -> AsyncIterator[bytes]:
    async for event in events:
        yield rewrite(event)
