"""The spans of a request: one for all of it, and below that one for what the runtime does of it."""

from __future__ import annotations

import asyncio
import os
import threading
from importlib.metadata import version
from typing import Final

from fastapi import FastAPI
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from winnow_service.headers import RawHeaders
from winnow_service.proxy.request_facts import PROBES, RequestFacts, request_facts
from winnow_service.runtime.client import Span

_SERVICE: Final = "winnow"
_SERVER_ERROR: Final = 500
_LAST_SECONDS: Final = 3.0
_CONTEXT: Final = TraceContextTextMapPropagator()
_CONTEXT_HEADERS: Final = ("traceparent", "tracestate")
# By OpenTelemetry's semantic conventions, where these have a name for it.
_ATTRIBUTES: Final = {
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
    "error": "error.type",
    "model": "gen_ai.response.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "request_id": "winnow.request_id",
    "key_id": "winnow.key_id",
    "policy": "winnow.policy",
    "policy_name": "winnow.policy_name",
    "outcome": "winnow.outcome",
    "ttft_seconds": "winnow.ttft_seconds",
}


class Tracing:
    """Traces requests, and sends the spans of those that have ended from a thread of its own."""

    def __init__(self) -> None:
        own = {SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", _SERVICE), SERVICE_VERSION: version("sglang-winnow")}
        self._provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer(_SERVICE)

    def install(self, app: FastAPI) -> None:
        """Trace every request of ``app``, whose entrance must have been installed."""
        app.add_middleware(_TracingMiddleware, tracer=self._tracer)

    def begin_span(self, method: str, url: URL) -> Span:
        """Begin the span of a request to the runtime that is sent for a request of ours."""
        if not trace.get_current_span().get_span_context().is_valid:
            return Span()
        attributes: dict[str, str | int] = {
            "http.request.method": method,
            "server.address": url.host or "",
            "server.port": url.port or 0,
        }
        return _RuntimeSpan(self._tracer.start_span(f"{method} runtime", kind=SpanKind.CLIENT, attributes=attributes))

    async def close(self) -> None:
        """Send what has not been sent yet, for some seconds at most."""
        # The SDK itself would wait for half a minute for a collector that does not answer.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, _LAST_SECONDS)


class _TracingMiddleware:
    """A span for each request, in the trace that its client began, if it did."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        sent = {name: headers[name] for name in _CONTEXT_HEADERS if name in headers}
        span = self._tracer.start_span("request", context=_CONTEXT.extract(sent), kind=SpanKind.SERVER)
        facts = request_facts(scope)
        facts.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        try:
            # The message of an exception may quote the request.
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                await self._app(scope, receive, send)
        finally:
            _describe(span, facts)
            span.end()


def _describe(span: trace.Span, facts: RequestFacts) -> None:
    span.update_name(f"{facts.method} {facts.route}")
    for name, attribute in _ATTRIBUTES.items():
        if (value := getattr(facts, name)) is not None:
            span.set_attribute(attribute, value)
    if facts.status is not None and facts.status >= _SERVER_ERROR:
        span.set_status(StatusCode.ERROR)


class _RuntimeSpan(Span):
    """The span of a request to the runtime, which lasts until the answer has been read or closed."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def carried_by(self, headers: RawHeaders) -> RawHeaders:
        context: dict[str, str] = {}
        _CONTEXT.inject(context, trace.set_span_in_context(self._span))
        others = [(name, value) for name, value in headers if name.lower().decode() not in _CONTEXT_HEADERS]
        return others + [(name.encode(), value.encode()) for name, value in context.items()]

    def answered(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)
        if status >= _SERVER_ERROR:
            self._span.set_status(StatusCode.ERROR)

    def failed(self, error: BaseException) -> None:
        self._span.set_attribute("error.type", type(error).__qualname__)
        self._span.set_status(StatusCode.ERROR)

    def end(self) -> None:
        self._span.end()
