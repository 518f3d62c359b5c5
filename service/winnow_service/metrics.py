"""The service's Prometheus metrics, and the middleware that measures HTTP."""

from __future__ import annotations

import time
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# From an error in milliseconds to a long answer on a CPU in many minutes.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """One registry for each application, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "winnow_http_requests_total",
            "HTTP requests that have ended, by route template, method and status class.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "winnow_http_requests_in_flight", "HTTP requests being answered now.", registry=self.registry
        )
        self.duration = Histogram(
            "winnow_http_request_duration_seconds",
            "From the request's first byte to the last byte of its answer.",
            ["route", "method"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.time_to_first_byte = Histogram(
            "winnow_http_time_to_first_byte_seconds",
            "From the request's first byte to the first byte of the body of its answer.",
            ["route", "method"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.client_disconnects = Counter(
            "winnow_client_disconnects_total",
            "Requests whose client left before the answer was complete.",
            ["route"],
            registry=self.registry,
        )
        self.policies = Counter(
            "winnow_requests_by_decode_policy_total",
            "Generation requests whose policies can be served, by decode policy; 'default' if they ask for none. "
            "A request with several policies counts once for each kind.",
            ["decode_policy"],
            registry=self.registry,
        )
        self.runtime_errors = Counter(
            "winnow_runtime_errors_total",
            "Requests that the runtime did not answer, or not completely, by kind.",
            ["kind"],
            registry=self.registry,
        )
        self.runtime_ready = Gauge(
            "winnow_runtime_ready", "1 if the runtime answered when last asked, else 0.", registry=self.registry
        )
        Info("winnow_build", "The version of Winnow.", registry=self.registry).info(
            {"version": version("sglang-winnow")}
        )
        ProcessCollector(namespace="winnow", registry=self.registry)


def route_template(scope: Scope) -> str:
    """The path of the matched route as it was declared: a bounded set, unlike the paths that clients send."""
    return getattr(scope.get("route"), "path", "unmatched")


class MetricsMiddleware:
    """Measures every HTTP request of the application it wraps."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        started = time.perf_counter()
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
