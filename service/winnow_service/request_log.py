"""One log line for each request, when it has ended, and what is known of a request until then.

To be installed last, so that what other middleware refuses has its line too::

    install_request_log(app)

Whoever learns something of a request writes it down, and the line (and the span, if there are traces) has it::

    request_facts(request.scope).key_id = caller.id

A fact is never what a client or an operator keeps secret: no prompt, no answer, no key, no path but its template, no
name of a policy or a model but those that exist here.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from http import HTTPMethod
from typing import Final

from fastapi import FastAPI
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from winnow_service.errors import PROBLEM_MEDIA_TYPE
from winnow_service.metrics.http import route_template
from winnow_service.request_id import REQUEST_ID_HEADER

logger = logging.getLogger(__name__)

_FACTS: Final = "facts"
_EVENT_STREAM: Final = "text/event-stream"
# SGLang begins the stream of a request that it does not take with this.
_REFUSED_STREAM: Final = b'data: {"error"'
_SERVER_ERROR: Final = 500
# Asked every few seconds, for ever: lines for debugging alone.
PROBES: Final = frozenset({"/healthz", "/readyz", "/metrics"})

_current: ContextVar[Scope | None] = ContextVar("current request", default=None)


@dataclass
class RequestFacts:
    """What is known of a request. None is not known, or does not apply.

    Attributes:
        method: of HTTP; "other" if it is none.
        route: the path as it was declared.
        status: of the answer; 500 if none was begun.
        duration_seconds: until the last byte of the answer was sent, or the client had left.
        ttft_seconds: until the first event of a stream.
        error: the code of the problem that was answered.
        key_id: of the caller.
        model: the name of the served model.
        policy: the kind of its decode policy.
        policy_name: the preset or stored policy that was asked for by name.
        outcome: of a generation, as the metrics count it.
        prompt_tokens, output_tokens: as the answer tells them.
        trace_id: under which its span is found.
    """

    request_id: str | None = None
    method: str | None = None
    route: str | None = None
    status: int | None = None
    duration_seconds: float | None = None
    ttft_seconds: float | None = None
    error: str | None = None
    key_id: str | None = None
    model: str | None = None
    policy: str | None = None
    policy_name: str | None = None
    outcome: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    trace_id: str | None = None


def install_request_log(app: FastAPI) -> None:
    """Log every request of ``app``."""
    app.add_middleware(RequestLogMiddleware)


def request_facts(scope: Scope) -> RequestFacts:
    """The facts of the request with this ``scope``."""
    facts: RequestFacts = scope.setdefault("state", {}).setdefault(_FACTS, RequestFacts())
    return facts


def current_request_id() -> str | None:
    """The id of the request that is being answered; None where that is none, or has no id yet."""
    scope = _current.get()
    return None if scope is None else Headers(scope=scope).get(REQUEST_ID_HEADER)


class RequestLogMiddleware:
    """Measures every request and logs it when it has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        # Never taken back: each request has a context of its own, and what handles its exception still needs it.
        _current.set(scope)
        facts = request_facts(scope)
        facts.status = _SERVER_ERROR
        started = time.perf_counter()
        media_type: str | None = None

        async def measured_send(message: Message) -> None:
            nonlocal media_type
            if message["type"] == "http.response.start":
                facts.status = message["status"]
                media_type = Headers(raw=message["headers"]).get("content-type", "").partition(";")[0]
            elif media_type is not None and (body := message.get("body")):
                if media_type == _EVENT_STREAM and not body.startswith(_REFUSED_STREAM):
                    facts.ttft_seconds = time.perf_counter() - started
                elif media_type == PROBLEM_MEDIA_TYPE:
                    facts.error = _code(body)
                media_type = None
            await send(message)

        try:
            await self._app(scope, receive, measured_send)
        finally:
            facts.request_id = current_request_id()
            facts.method = scope["method"] if scope["method"] in HTTPMethod.__members__ else "other"
            facts.route = route_template(scope)
            facts.duration_seconds = time.perf_counter() - started
            _log(facts)


def _code(problem: bytes) -> str | None:
    try:
        return str(from_json(problem)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return None


def _log(facts: RequestFacts) -> None:
    assert facts.status is not None
    if facts.status >= _SERVER_ERROR:
        level = logging.WARNING
    else:
        level = logging.DEBUG if facts.route in PROBES else logging.INFO
    if logger.isEnabledFor(level):
        fields = {name: _rounded(value) for name, value in asdict(facts).items() if value is not None}
        logger.log(level, "%s %s: %s", facts.method, facts.route, facts.status, extra={"fields": fields})


def _rounded(value: object) -> object:
    # Times to the microsecond.
    return round(value, 6) if isinstance(value, float) else value
