"""Refusing a request before anything else of it is read: the service is about to end, or the head is too long."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from winnow_service.admission.drain import Drain
from winnow_service.errors import ServiceError, problem_response
from winnow_service.metrics.instruments import Metrics
from winnow_service.proxy.request_facts import PROBES


class GateMiddleware:
    """Refuses what may not come in, and counts what ``drain`` waits for.

    Args:
        max_head_bytes: of the path and the headers. The server's own limit is for heads that do not come to an end.
    """

    def __init__(self, app: ASGIApp, drain: Drain, max_head_bytes: int, metrics: Metrics) -> None:
        self._app = app
        self._drain = drain
        self._max_head_bytes = max_head_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Operators ask probes to the end.
        is_probe = scope["path"] in PROBES
        refusal = self._refusal(scope, is_probe=is_probe)
        if refusal is not None:
            self._metrics.refusals.labels(refusal.code).inc()
            await problem_response(refusal)(scope, receive, send)
        elif is_probe:
            await self._app(scope, receive, send)
        else:
            await self._counted(scope, receive, send)

    def _refusal(self, scope: Scope, *, is_probe: bool) -> ServiceError | None:
        if self._drain.draining and not is_probe:
            return ServiceError("draining")
        if _head_bytes(scope) > self._max_head_bytes:
            return ServiceError("headers_too_large", limit=self._max_head_bytes)
        return None

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing_send(message: Message) -> None:
            if self._drain.draining and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        self._drain.active += 1
        try:
            await self._app(scope, receive, closing_send)
        finally:
            self._drain.active -= 1


def _head_bytes(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope["raw_path"]) + len(scope["query_string"])
