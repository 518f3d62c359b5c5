"""The pipeline: what becomes of a request for the runtime, from its body to its answer.

``Forwarder.generate`` is the way of a request that generates. Its steps are in the other modules of this folder, and
none of them calls back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from fastapi import Request, Response
from pydantic_core import to_json

from winnow_kernels.contract.request_body import FIELD
from winnow_kernels.policies.quality import NAME as AUTO_QUALITY
from winnow_service.admission.queue import AdmissionQueue, QueueTicket
from winnow_service.errors import ClientDisconnected, InvalidField, InvalidPolicy, RuntimeFailure
from winnow_service.keys.keyring import ANYONE, Caller
from winnow_service.limits.limiter import Limiter
from winnow_service.metrics.instruments import Metrics
from winnow_service.policies.registry import PolicyRegistry
from winnow_service.proxy.answer import AnswerReader
from winnow_service.proxy.attention_field import Given, Policies, place_policies
from winnow_service.proxy.body import Form, JsonBody, read_json_object
from winnow_service.proxy.charge import SettlingResponse, reserve
from winnow_service.proxy.choice import Choice, choose
from winnow_service.proxy.client_leaving import unless_client_leaves
from winnow_service.proxy.estimate import has_several_answers
from winnow_service.proxy.event_stream import EventStreamResponse
from winnow_service.proxy.generation import Generation
from winnow_service.proxy.headers import to_client
from winnow_service.proxy.incidents import Incidents
from winnow_service.proxy.request_facts import request_facts
from winnow_service.proxy.upstream import as_served, upstream_request
from winnow_service.runtime.client import RuntimeRequest
from winnow_service.runtime.prefix import prefix_of
from winnow_service.runtime.runtime import Call, Runtime
from winnow_service.settings import Settings

_WARNING = "winnow-warning"
# What a request without a policy is counted as, and one with several kinds of them. One whose policy the runtime
# chooses is counted as such.
_DEFAULT_POLICY = "default"
_SEVERAL_POLICIES = "mixed"


@dataclass(frozen=True)
class _Asked:
    """What a client asks for."""

    request: Request
    form: Form
    body: JsonBody
    choice: Choice


@dataclass(frozen=True)
class Forwarder:
    """Forwards what callers may send. A client that leaves takes its request with it."""

    runtime: Runtime
    metrics: Metrics
    settings: Settings
    registry: PolicyRegistry
    limiter: Limiter
    queue: AdmissionQueue

    async def forward(self, request: Request) -> Response:
        """Forward a request without a body."""
        return await self._forward(request, b"")

    async def forward_json(self, request: Request) -> Response:
        """Forward a request whose body must be a JSON object. The runtime gets the very bytes that the client sent."""
        body = await read_json_object(request, self.settings.max_body_bytes)
        return await self._forward(request, body.content)

    async def generate(self, caller: Caller, request: Request, form: Form) -> Response:
        """Forward a request that may ask for policies: in its turn, with the caller's policy, within its limits.

        Without any policy, the runtime gets the very bytes that were sent.

        Raises:
            ServiceError: the runtime has not seen the request, or has not answered it.
        """
        body = await read_json_object(request, self.settings.max_body_bytes)
        if form is Form.RESPONSES and body.members.get("background"):
            # Whose it is, the runtime does not know.
            raise InvalidField("background", "not served: responses cannot be fetched later")
        choice = choose(body.members, form, self.registry, caller)
        key_id = None if caller is ANYONE else caller.id
        facts = request_facts(request.scope)
        facts.key_id = key_id
        if isinstance(asked := body.members.get(FIELD), str):
            facts.policy_name = asked
        ticket = self.queue.join(key_id)
        try:
            return await self._charged(caller, _Asked(request, form, body, choice), ticket)
        except BaseException:
            ticket.leave()
            raise

    async def _charged(self, caller: Caller, asked: _Asked, ticket: QueueTicket) -> Response:
        """Answer within the limits of ``caller``, which are charged when the answer has been sent."""
        charge = await reserve(self.limiter, self.metrics, caller, asked.body.members, asked.form)
        incidents = Incidents(asked.request, self.metrics)
        try:
            with incidents.watched():
                answering = self._answer_in_turn(asked, ticket, incidents)
                response, generation = await unless_client_leaves(asked.request.receive, answering)
        except BaseException as error:
            if charge is not None:
                is_timeout = isinstance(error, RuntimeFailure) and error.code == "request_timeout"
                # What the runtime has begun is not free because its client does not wait for the end.
                begun = ticket.runs and (isinstance(error, ClientDisconnected) or is_timeout)
                await charge.settle(charge.reservation.tokens if begun else 0)
            raise
        if charge is None:
            return response
        response.headers.update(charge.reservation.headers)
        return SettlingResponse(response, lambda: charge.settle(charge.used(response.status_code, generation.usage)))

    async def _forward(self, request: Request, content: bytes) -> Response:
        outgoing = upstream_request(request, content)
        incidents = Incidents(request, self.metrics)

        async def answer() -> Response:
            answer = self.runtime.begin()
            await answer.send(outgoing)
            if answer.is_event_stream:
                return EventStreamResponse(answer, incidents, stall_seconds=self.settings.client_stall_timeout_seconds)
            return await _whole(answer, lambda body: body)

        with incidents.watched():
            return await unless_client_leaves(request.receive, answer())

    async def _answer_in_turn(
        self, asked: _Asked, ticket: QueueTicket, incidents: Incidents
    ) -> tuple[Response, Generation]:
        """Answer when it is the turn of ``ticket``, which is left when the runtime has done its part."""
        await ticket.turn()
        answer = self.runtime.begin()
        try:
            outgoing = await self._outgoing(asked)
            generation = self._begin(asked)
        except BaseException:
            answer.end()
            raise
        try:
            await answer.send(outgoing)
            response: Response
            if answer.is_event_stream:
                response = EventStreamResponse(
                    answer,
                    incidents,
                    form=asked.form,
                    stall_seconds=self.settings.client_stall_timeout_seconds,
                    observer=generation,
                    on_end=ticket.leave,
                )
            else:
                response = await _whole(answer, lambda body: generation.end_with(answer.status, body))
                ticket.leave()
        except BaseException as error:
            generation.end_without_answer(error)
            raise
        for warning in asked.choice.warnings:
            response.headers.append(_WARNING, warning)
        return response, generation

    async def _outgoing(self, asked: _Asked) -> RuntimeRequest:
        """Return what the runtime gets."""
        content, members, policies = asked.body.content, asked.body.members, asked.choice.policies
        if policies is not None:
            served = await self._as_served(policies, asked)
            content = to_json(place_policies(members, asked.form, served), inf_nan_mode="constants")
        streams = bool(members.get("stream"))
        return upstream_request(asked.request, content, streams=streams, prefix=prefix_of(members))

    async def _as_served(self, policies: Given, asked: _Asked) -> Given:
        try:
            return await as_served(policies, self.runtime.served, asked.request.headers.get("authorization"))
        except InvalidPolicy as error:
            if (name := asked.choice.name) is None:
                raise
            # Who asked by name, or for nothing, does not know the field.
            raise InvalidPolicy(error.path, f"in the policy {name!r}, {error.problem}") from None

    def _begin(self, asked: _Asked) -> Generation:
        """Count the request by its policies, and begin to measure it."""
        kinds = _decode_policies(asked.choice.policies)
        for name in kinds:
            self.metrics.policies.labels(name).inc()
        members = asked.body.members
        several = bool(members.get("stream")) and has_several_answers(members, asked.form)
        return Generation(
            self.metrics,
            kinds.pop() if len(kinds) == 1 else _SEVERAL_POLICIES,
            self.runtime.model,
            request_facts(asked.request.scope),
            AnswerReader(asked.form, asked.choice.warnings, several=several),
        )


def forwarder_of(request: Request) -> Forwarder:
    """The forwarder, for routes whose every microsecond is the caller's: resolving a dependency takes fifty."""
    return cast(Forwarder, request.app.state.forwarder)


def _decode_policies(policies: Policies) -> set[str]:
    if policies is None:
        return {_DEFAULT_POLICY}
    several = policies if isinstance(policies, list) else [policies]
    return {policy.decode.policy if policy.quality is None else AUTO_QUALITY for policy in several}


async def _whole(answer: Call, rewrite: Callable[[bytes], bytes]) -> Response:
    # An answer that is not a stream is read to its end first: if the runtime dies in it, the status can still say so.
    try:
        response = Response(rewrite(await answer.read()), status_code=answer.status)
    finally:
        await answer.close()
    response.raw_headers.extend(to_client(answer.headers))
    return response
