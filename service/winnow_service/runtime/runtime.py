"""The runtime behind the service, and the requests that are on their way to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from math import ceil
from typing import Final

from winnow_service.errors import RuntimeFailure, ServiceError
from winnow_service.headers import RUNTIME_HEADER, RawHeaders
from winnow_service.metrics.instruments import Metrics
from winnow_service.runtime.breaker import BreakerState, CircuitBreaker
from winnow_service.runtime.client import BeginSpan, RuntimeAnswer, RuntimeClient, RuntimeRequest
from winnow_service.runtime.monitor import RuntimeMonitor
from winnow_service.runtime.served_model import ServedModelLookup
from winnow_service.settings import Settings

# What a runtime says that is alive, and has too much to do or is about to end.
UNAVAILABLE = 503
_UNKNOWN_MODEL: Final = "unknown"


@dataclass(frozen=True)
class RuntimeState:
    """The runtime as operators see it.

    Attributes:
        usable: whether requests are sent to it; if not, ``reason`` says why.
    """

    name: str
    usable: bool
    breaker: BreakerState
    model: str
    reason: str


class Runtime:
    """The runtime that ``settings`` name, or a balancer in front of several that are alike. ``run`` watches it.

    Args:
        begin_span: follows what is sent to it.

    Attributes:
        name: host and port, by which it is known in logs and metrics.
        calls: how many requests it has of this service.
    """

    def __init__(self, settings: Settings, metrics: Metrics, begin_span: BeginSpan | None) -> None:
        url = settings.runtime_url
        self.name = f"{url.host}:{url.port}"
        self.client = RuntimeClient(url, self.name, settings, begin_span)
        self.breaker = CircuitBreaker(settings.breaker_failures, settings.breaker_open_seconds)
        self.monitor = RuntimeMonitor(self.client, settings, self._changed)
        self.served = ServedModelLookup(self.client, self.monitor, settings.readiness_timeout_seconds)
        self.calls = 0
        self._measure(metrics)

    @property
    def model(self) -> str:
        """The name of the served model; "unknown" if the runtime has not told it."""
        return self.monitor.model or _UNKNOWN_MODEL

    @property
    def state(self) -> RuntimeState:
        usable, reason = self.monitor.readiness.ready, self.monitor.readiness.reason
        if usable and self.breaker.state is BreakerState.OPEN:
            usable, reason = False, "The runtime has failed several times in a row."
        return RuntimeState(self.name, usable, self.breaker.state, self.model, reason)

    def begin(self) -> Call:
        """Reserve a request.

        Raises:
            ServiceError: the runtime is not asked now.
        """
        if not self.breaker.permits:
            raise ServiceError("circuit_open", retry_seconds=max(1, ceil(self.breaker.retry_in)))
        return Call(self)

    async def run(self) -> None:
        """Watch it for ever; ends when cancelled."""
        await self.monitor.run()

    async def close(self) -> None:
        await self.client.close()

    def _changed(self) -> None:
        if self.monitor.readiness.ready:
            self.breaker.try_now()

    def _measure(self, metrics: Metrics) -> None:
        metrics.runtime_ready.labels(self.name).set_function(lambda: self.monitor.readiness.ready)
        metrics.runtime_calls.labels(self.name).set_function(lambda: self.calls)
        for state in BreakerState:
            metrics.breaker_state.labels(self.name, state).set_function(
                lambda state=state: self.breaker.state is state  # type: ignore[misc]
            )


class Call:
    """One request to the runtime, and its answer.

    Attributes:
        status, headers, is_event_stream: of the answer, once its head has come.
    """

    status: int
    headers: RawHeaders
    is_event_stream: bool

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._permit = runtime.breaker.permit()
        self._ended = False
        self._answer: RuntimeAnswer | None = None
        runtime.calls += 1

    async def send(self, request: RuntimeRequest) -> None:
        """Send it, and wait for the head of the answer; then ``close`` must be called.

        Raises:
            RuntimeFailure: there is none. The call has ended.
        """
        try:
            self._answer = answer = await self._runtime.client.send(request)
        except BaseException as error:
            if isinstance(error, RuntimeFailure):
                self._fail(error)
            self.end()
            raise
        self.status, self.headers, self.is_event_stream = answer.status, answer.headers, answer.is_event_stream

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body, as it arrives. Raises RuntimeFailure if no more of it is to come."""
        assert self._answer is not None
        begun = False
        try:
            async with aclosing(self._answer.chunks()) as chunks:
                async for chunk in chunks:
                    if not begun and self.status != UNAVAILABLE:
                        begun = True
                        self._permit.begun()
                    yield chunk
        except RuntimeFailure as failure:
            # One of several behind a balancer says so in its head. The others may be well.
            self._fail(failure, balanced=any(name.lower() == RUNTIME_HEADER for name, _ in self.headers))
            raise
        if self.status != UNAVAILABLE:
            self._permit.answered()

    async def read(self) -> bytes:
        """The whole body. Raises as ``chunks`` does."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def close(self) -> None:
        """Close the connection. Before its end that aborts the generation."""
        try:
            if self._answer is not None:
                await self._answer.close()
        finally:
            self.end()

    def end(self) -> None:
        """It is over. After the first time nothing happens."""
        if not self._ended:
            self._ended = True
            self._permit.drop()
            self._runtime.calls -= 1

    def _fail(self, failure: RuntimeFailure, *, balanced: bool = False) -> None:
        self._runtime.monitor.ask_now()
        # An answer that was too long is no failure.
        if not balanced and failure.code != "request_timeout":
            self._permit.failed()
