"""Passing a client's request on to the runtime, and the runtime's answer back."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from fastapi import Request, Response

from winnow_service import headers
from winnow_service.errors import ClientDisconnected, RuntimeFailure
from winnow_service.metrics import Metrics, route_template
from winnow_service.request_body import read_json_object
from winnow_service.request_id import REQUEST_ID_HEADER
from winnow_service.runtime.client import RuntimeAnswer, RuntimeClient, RuntimeRequest
from winnow_service.runtime.monitor import RuntimeMonitor
from winnow_service.settings import Settings
from winnow_service.streaming import EventStreamResponse

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Forwarder:
    """Forwards requests to the runtime. A client that leaves takes its request with it."""

    client: RuntimeClient
    monitor: RuntimeMonitor
    metrics: Metrics
    settings: Settings

    async def forward(self, request: Request) -> Response:
        """Forward a request without a body."""
        return await self._forward(request, b"")

    async def forward_json(self, request: Request) -> Response:
        """Forward a request whose body must be a JSON object. The runtime gets the very bytes that the client sent."""
        return await self._forward(request, await read_json_object(request, self.settings.max_body_bytes))

    async def _forward(self, request: Request, body: bytes) -> Response:
        outgoing = RuntimeRequest(
            method=request.method,
            path=request.scope["raw_path"].decode("latin-1"),
            query=request.scope["query_string"],
            headers=headers.to_runtime(request.headers.items()),
            body=body,
        )
        try:
            return await self._unless_client_leaves(request, outgoing)
        except RuntimeFailure as failure:
            self._note_failure(request, failure)
            raise

    async def _unless_client_leaves(self, request: Request, outgoing: RuntimeRequest) -> Response:
        # Cancelling the task closes its connection, and the closed connection makes the runtime abort.
        answering = asyncio.create_task(self._answer(request, outgoing))
        leaving = asyncio.create_task(_client_leaves(request))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            self._note_disconnect(request)
            raise ClientDisconnected
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, request: Request, outgoing: RuntimeRequest) -> Response:
        answer = await self.client.send(outgoing)
        if answer.is_event_stream:
            return EventStreamResponse(
                answer,
                headers.to_client(answer.headers),
                on_failure=lambda failure: self._note_failure(request, failure),
                on_disconnect=lambda: self._note_disconnect(request),
            )
        return await _whole(answer)

    def _note_failure(self, request: Request, failure: RuntimeFailure) -> None:
        logger.warning("Request %s: %s", request.headers[REQUEST_ID_HEADER], failure.message)
        self.metrics.runtime_errors.labels(failure.code).inc()
        self.monitor.ask_now()

    def _note_disconnect(self, request: Request) -> None:
        logger.info("Request %s: the client left", request.headers[REQUEST_ID_HEADER])
        self.metrics.client_disconnects.labels(route_template(request.scope)).inc()


async def _whole(answer: RuntimeAnswer) -> Response:
    # An answer that is not a stream is read to its end first: if the runtime dies in it, the status can still say so.
    try:
        response = Response(await answer.read(), status_code=answer.status)
    finally:
        await answer.close()
    for name, value in headers.to_client(answer.headers):
        response.headers.append(name, value)
    return response


async def _client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
