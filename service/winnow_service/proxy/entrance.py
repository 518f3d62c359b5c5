"""The first step of every request: it gets an id, and when it has ended it is measured and has its line in the log.

To be installed last, so that what other middleware refuses is measured and logged too.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from dataclasses import asdict
from http import HTTPMethod
from typing import Final

from pydantic_core import from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from winnow_service.errors import PROBLEM_MEDIA_TYPE
from winnow_service.headers import REQUEST_ID_HEADER
from winnow_service.logs import current_request_id
from winnow_service.metrics.instruments import Metrics
from winnow_service.proxy.answer import REFUSED_STREAM
from winnow_service.proxy.request_facts import PROBES, RequestFacts, request_facts, route_template

# Operators filter by this name.
logger = logging.getLogger("winnow_service.request_log")

_USABLE_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_EVENT_STREAM: Final = "text/event-stream"
_SERVER_ERROR: Final = 500
_MEASURED_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class EntranceMiddleware:
    """Names, measures and logs every HTTP request of the application it wraps.

    The id is the client's own ``x-request-id`` if it sent a usable one, else one of ours. It is in the request's
    headers, from where it is passed on to the runtime, and in the answer's.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        facts = request_facts(scope)
        started = facts.started
        facts.request_id = request_id = _named(scope)
        current_request_id.set(request_id)
        facts.status = _SERVER_ERROR
        first_byte: float | None = None
        media_type = ""

        async def measured_send(message: Message) -> None:
            nonlocal first_byte, media_type
            if message["type"] == "http.response.start":
                facts.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                media_type = headers.get("content-type", "").partition(";")[0]
            elif first_byte is None and (body := message.get("body")):
                first_byte = time.perf_counter()
                _note_beginning(facts, media_type, body, first_byte - started)
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, measured_send)
        finally:
            facts.method = scope["method"] if scope["method"] in HTTPMethod.__members__ else "other"
            facts.route = route_template(scope)
            facts.duration_seconds = time.perf_counter() - started
            self._count(facts, scope["method"], None if first_byte is None else first_byte - started)
            _log(facts)

    def _count(self, facts: RequestFacts, method: str, first_byte_seconds: float | None) -> None:
        labels = (facts.route, method if method in _MEASURED_METHODS else "other")
        assert facts.status is not None
        assert facts.duration_seconds is not None
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(*labels, f"{facts.status // 100}xx").inc()
        self._metrics.duration.labels(*labels).observe(facts.duration_seconds)
        if first_byte_seconds is not None:
            self._metrics.time_to_first_byte.labels(*labels).observe(first_byte_seconds)


def _named(scope: Scope) -> str:
    """Return the id of a request, which is in its headers from now on."""
    request_id = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    if not _USABLE_ID.fullmatch(request_id):
        request_id = uuid.uuid4().hex
    MutableHeaders(scope=scope)[REQUEST_ID_HEADER] = request_id
    return request_id


def _note_beginning(facts: RequestFacts, media_type: str, body: bytes, seconds: float) -> None:
    """Write down what the first bytes of an answer say, which came after so many seconds."""
    if media_type == _EVENT_STREAM and not body.startswith(REFUSED_STREAM):
        facts.ttft_seconds = seconds
    elif media_type == PROBLEM_MEDIA_TYPE:
        facts.error = _code(body)


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
        known = {name: value for name, value in asdict(facts).items() if value is not None}
        # Times to the microsecond.
        fields = {name: round(value, 6) if isinstance(value, float) else value for name, value in known.items()}
        logger.log(level, "%s %s: %s", facts.method, facts.route, facts.status, extra={"fields": fields})
