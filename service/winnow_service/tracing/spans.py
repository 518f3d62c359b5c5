"""The spans of a request: one for all of it, and below that one for what the runtime does of it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Final

from fastapi import FastAPI
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from winnow_service.proxy.request_facts import PROBES, RequestFacts, request_facts
from winnow_service.runtime.client import IncomingResponse, OutgoingRequest, Stream
from winnow_service.runtime.client import Send as SendToRuntime

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

    def sending(self, send: SendToRuntime) -> SendToRuntime:
        """Return ``send`` with a span for each request that it sends for a request of ours."""

        async def traced_send(request: OutgoingRequest) -> IncomingResponse:
            if not trace.get_current_span().get_span_context().is_valid:
                return await send(request)
            return await _send_traced(request, send, self._tracer)

        return traced_send

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


def _describe(span: Span, facts: RequestFacts) -> None:
    span.update_name(f"{facts.method} {facts.route}")
    for name, attribute in _ATTRIBUTES.items():
        if (value := getattr(facts, name)) is not None:
            span.set_attribute(attribute, value)
    if facts.status is not None and facts.status >= _SERVER_ERROR:
        span.set_status(StatusCode.ERROR)


async def _send_traced(request: OutgoingRequest, send: SendToRuntime, tracer: Tracer) -> IncomingResponse:
    """Send ``request`` with the context of its span, which lasts until the answer has been read or closed."""
    method = request.method
    attributes: dict[str, str | int] = {
        "http.request.method": method,
        "server.address": request.url.host or "",
        "server.port": request.url.port or 0,
    }
    span = tracer.start_span(f"{method} runtime", kind=SpanKind.CLIENT, attributes=attributes)
    context: dict[str, str] = {}
    _CONTEXT.inject(context, trace.set_span_in_context(span))
    others = [(name, value) for name, value in request.headers if name.lower().decode() not in _CONTEXT_HEADERS]
    request.headers = others + [(name.encode(), value.encode()) for name, value in context.items()]
    try:
        response = await send(request)
    except BaseException as error:
        _fail(span, error)
        span.end()
        raise
    span.set_attribute("http.response.status_code", response.status)
    if response.status >= _SERVER_ERROR:
        span.set_status(StatusCode.ERROR)
    response.stream = _TracedStream(response.stream, span)
    return response


class _TracedStream:
    def __init__(self, stream: Stream, span: Span) -> None:
        self._stream = stream
        self._span = span

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._stream:
                yield chunk
        except Exception as error:
            _fail(self._span, error)
            raise

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._span.end()


def _fail(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__qualname__)
    span.set_status(StatusCode.ERROR)
