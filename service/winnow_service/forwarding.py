"""Passing a client's request on to a runtime, and the runtime's answer back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from urllib.parse import unquote

from fastapi import Request, Response
from pydantic_core import to_json

from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_service import headers
from winnow_service.attention.answer import lift_in_body, lift_in_events
from winnow_service.attention.request import Form, Policies, each_policy, place_policies
from winnow_service.client_leaving import unless_client_leaves
from winnow_service.errors import ClientDisconnected, NotFound, RuntimeFailure, RuntimeUnavailable
from winnow_service.metrics.generation import Generation
from winnow_service.metrics.http import route_template, started_at
from winnow_service.metrics.instruments import Metrics
from winnow_service.request_body import JsonBody, read_json_object
from winnow_service.request_id import REQUEST_ID_HEADER
from winnow_service.request_log import request_facts
from winnow_service.runtime.balancer import prefix_of
from winnow_service.runtime.client import RuntimeRequest
from winnow_service.runtime.pool import RuntimePool
from winnow_service.runtime.runtime import UNAVAILABLE, Answer, Call, Runtime
from winnow_service.runtime.served_model import ServedModelLookup, not_served
from winnow_service.settings import Settings
from winnow_service.streaming import EventStreamResponse

logger = logging.getLogger(__name__)

# What a request without a policy is counted as, and one with several kinds of them.
_DEFAULT_POLICY = "default"
_SEVERAL_POLICIES = "mixed"


def _unchanged(content: bytes) -> bytes:
    return content


@dataclass(frozen=True)
class Forwarder:
    """Forwards requests to the runtimes. A client that leaves takes its request with it."""

    runtimes: RuntimePool
    metrics: Metrics
    settings: Settings

    @property
    def served(self) -> ServedModelLookup:
        """Tells what the runtimes serve."""
        return self.runtimes.typical.served

    async def forward(self, request: Request) -> Response:
        """Forward a request without a body."""
        return await self._unless_client_leaves(request, self._forward(request, b""))

    async def forward_json(self, request: Request) -> Response:
        """Forward a request whose body must be a JSON object. The runtime gets the very bytes that the client sent."""
        body = await read_json_object(request, self.settings.max_body_bytes)
        return await self._unless_client_leaves(request, self._forward(request, body.content))

    async def _forward(self, request: Request, content: bytes) -> Response:
        answer = await self._send(self.runtimes.begin(None), None, _outgoing(request, content))
        return await self._response(request, answer)

    async def _generate(self, request: Request, form: Form, body: JsonBody, policies: Policies) -> Response:
        prefix = prefix_of(body.members)
        call = self.runtimes.begin(prefix)
        try:
            content = body.content
            if policies is not None:
                served = await _as_served(policies, call.runtime, request.headers.get("authorization"))
                content = to_json(place_policies(body.members, form, served), inf_nan_mode="constants")
            kinds = _decode_policies(policies)
            for name in kinds:
                self.metrics.policies.labels(name).inc()
            kind = kinds.pop() if len(kinds) == 1 else _SEVERAL_POLICIES
        except BaseException:
            call.end()
            raise
        outgoing = _outgoing(request, content, streams=bool(body.members.get("stream")))
        generation = Generation(
            self.metrics, kind, self.runtimes.model, started_at(request.scope), request_facts(request.scope)
        )

        async def answer() -> Response:
            rewriting = (lift_in_body, lift_in_events) if form is Form.NATIVE else (_unchanged, _unchanged)
            return await self._response(request, await self._send(call, prefix, outgoing), *rewriting)

        return await _measured(generation, answer())

    async def _unless_client_leaves(self, request: Request, answer: Coroutine[None, None, Response]) -> Response:
        # Cancelling the task closes its connection, and the closed connection makes the runtime abort.
        try:
            return await unless_client_leaves(request.receive, answer)
        except ClientDisconnected:
            self._note_disconnect(request)
            raise
        except RuntimeFailure as failure:
            self._note_failure(request, failure)
            raise

    async def _send(self, call: Call, prefix: bytes | None, outgoing: RuntimeRequest) -> Answer:
        """Send a request; to a second runtime, if there is one and the first has not taken it."""
        try:
            answer = await call.send(outgoing)
        except RuntimeUnavailable as failure:
            other = self.runtimes.begin_elsewhere(prefix, call.runtime)
            if other is None:
                raise
            self.metrics.runtime_errors.labels(failure.code).inc()
            self._note_retry(call.runtime, failure.message)
            return await other.send(outgoing)
        if answer.status != UNAVAILABLE:
            return answer
        other = self.runtimes.begin_elsewhere(prefix, call.runtime)
        if other is None:
            return answer
        self._note_retry(call.runtime, f"It answered with status {UNAVAILABLE}.")
        try:
            await answer.close()
        except BaseException:
            other.end()
            raise
        return await other.send(outgoing)

    async def _response(
        self,
        request: Request,
        answer: Answer,
        rewrite_body: Callable[[bytes], bytes] = _unchanged,
        rewrite_events: Callable[[bytes], bytes] = _unchanged,
    ) -> Response:
        if answer.is_event_stream:
            return EventStreamResponse(
                answer,
                headers.to_client(answer.headers),
                stall_seconds=self.settings.client_stall_timeout_seconds,
                on_failure=lambda failure: self._note_failure(request, failure),
                on_disconnect=lambda: self._note_disconnect(request),
                rewrite=rewrite_events,
            )
        return await _whole(answer, rewrite_body)

    def _note_retry(self, runtime: Runtime, reason: str) -> None:
        logger.warning("Runtime %s did not take a request, and another gets it: %s", runtime.name, reason)
        self.metrics.runtime_retries.inc()

    def _note_failure(self, request: Request, failure: RuntimeFailure) -> None:
        logger.warning("Request %s: %s", request.headers[REQUEST_ID_HEADER], failure.message)
        self.metrics.runtime_errors.labels(failure.code).inc()

    def _note_disconnect(self, request: Request) -> None:
        logger.info("Request %s: the client left", request.headers[REQUEST_ID_HEADER])
        self.metrics.client_disconnects.labels(route_template(request.scope)).inc()


def _outgoing(request: Request, content: bytes, *, streams: bool = False) -> RuntimeRequest:
    path: str = request.scope["raw_path"].decode("latin-1")
    # Whoever follows these comes to what the service does not pass on.
    if any(segment in (".", "..") for segment in unquote(path).split("/")):
        raise NotFound(request.url.path)
    return RuntimeRequest(
        method=request.method,
        path=path,
        query=request.scope["query_string"],
        headers=headers.to_runtime(request.headers.raw),
        body=content,
        streams=streams,
    )


async def _as_served(
    policies: AttentionPolicy | list[AttentionPolicy], runtime: Runtime, authorization: str | None
) -> AttentionPolicy | list[AttentionPolicy]:
    asked = policies if isinstance(policies, list) else [policies]
    if all(policy.is_dense for policy in asked):
        return policies
    model = await runtime.served.get(authorization)
    if model is None:
        raise not_served()
    return each_policy(policies, model.check) if isinstance(policies, list) else model.check(policies)


def _decode_policies(policies: Policies) -> set[str]:
    if policies is None:
        return {_DEFAULT_POLICY}
    return {policy.decode.policy for policy in (policies if isinstance(policies, list) else [policies])}


async def _measured(generation: Generation, answer: Awaitable[Response]) -> Response:
    """Return ``answer``. A stream goes on being measured when it is sent."""
    try:
        response = await answer
    except BaseException as error:
        # The task is cancelled when its client leaves.
        if isinstance(error, asyncio.CancelledError):
            generation.abandon()
        else:
            generation.fail()
        generation.end()
        raise
    if isinstance(response, EventStreamResponse):
        response.observer = generation
    else:
        generation.end_with(response.status_code, bytes(response.body))
    return response


async def _whole(answer: Answer, rewrite: Callable[[bytes], bytes]) -> Response:
    # An answer that is not a stream is read to its end first: if the runtime dies in it, the status can still say so.
    try:
        response = Response(rewrite(await answer.read()), status_code=answer.status)
    finally:
        await answer.close()
    response.raw_headers.extend(headers.to_client(answer.headers))
    return response
