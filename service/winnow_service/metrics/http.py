"""Measuring HTTP: every request, and every refusal."""

from __future__ import annotations

import time
from typing import Final

from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from winnow_service.errors import ClientDisconnected, RuntimeFailure, ServiceError, problem_response
from winnow_service.metrics.instruments import Metrics

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_STARTED: Final = "started"


def route_template(scope: Scope) -> str:
    """The path of the matched route as it was declared: a bounded set, unlike the paths that clients send."""
    return getattr(scope.get("route"), "path", "unmatched")


def started_at(scope: Scope) -> float:
    """When the request began, by ``time.perf_counter``."""
    started: float = scope["state"][_STARTED]
    return started


def count_refusals(app: FastAPI, metrics: Metrics) -> None:
    """Count what ``app`` refuses; to be called when its error handlers are installed."""

    async def refuse(_: Request, error: Exception) -> Response:
        assert isinstance(error, ServiceError)
        if not isinstance(error, RuntimeFailure | ClientDisconnected):
            metrics.refusals.labels(error.code).inc()
        return problem_response(error)

    app.add_exception_handler(ServiceError, refuse)


class MetricsMiddleware:
    """Measures every HTTP request of the application it wraps."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        started = scope.setdefault("state", {})[_STARTED] = time.perf_counter()
        first_byte: float | None = None
        status = 500

        async def measured_send(message: Message) -> None:
            nonlocal first_byte, status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body" and first_byte is None and message.get("body"):
                first_byte = time.perf_counter()
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, measured_send)
        finally:
            route = route_template(scope)
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(route, method, f"{status // 100}xx").inc()
            self._metrics.duration.labels(route, method).observe(time.perf_counter() - started)
            if first_byte is not None:
                self._metrics.time_to_first_byte.labels(route, method).observe(first_byte - started)
