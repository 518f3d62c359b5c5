"""The end of the service: what is being answered is finished, what comes is sent elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from winnow_service.admission.refusals import Draining
from winnow_service.errors import problem_response
from winnow_service.metrics.instruments import Metrics

# What operators ask to the end.
_ALWAYS_ANSWERED: Final = frozenset({"/healthz", "/readyz", "/metrics"})


class Drain:
    """Knows whether the service is about to end.

    Attributes:
        active: requests being answered that the end waits for.
    """

    def __init__(self) -> None:
        self._told: list[Callable[[], None]] = []
        self.draining = False
        self.active = 0

    def when_begun(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called once, when it begins."""
        self._told.append(tell)

    def begin(self) -> None:
        """Let nothing in any more."""
        self.draining = True
        for tell in self._told:
            tell()


class DrainMiddleware:
    """Counts what is being answered, and refuses what comes after ``drain`` has begun."""

    def __init__(self, app: ASGIApp, drain: Drain, metrics: Metrics) -> None:
        self._app = app
        self._drain = drain
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _ALWAYS_ANSWERED:
            await self._app(scope, receive, send)
            return
        if self._drain.draining:
            refusal = Draining()
            self._metrics.refusals.labels(refusal.code).inc()
            await problem_response(refusal)(scope, receive, send)
            return

        async def closing_send(message: Message) -> None:
            if self._drain.draining and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        self._drain.active += 1
        try:
            await self._app(scope, receive, closing_send)
        finally:
            self._drain.active -= 1
