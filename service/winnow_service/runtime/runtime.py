"""The runtime behind the service, and the requests that are on their way to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from math import ceil
from typing import Final

from winnow_service.errors import RuntimeFailure, ServiceError
from winnow_service.headers import RUNTIME_HEADER
from winnow_service.metrics.instruments import Metrics
from winnow_service.runtime.breaker import BreakerState, CircuitBreaker
from winnow_service.runtime.client import RuntimeAnswer, RuntimeClient, RuntimeRequest, Traced
from winnow_service.runtime.monitor import RuntimeMonitor
from winnow_service.runtime.served_model import ServedModelLookup
from winnow_service.settings import Settings

# What a runtime says that is alive, and has too much to do or is about to end.
UNAVAILABLE = 503
_UNKNOWN_MODEL: Final = "unknown"


@dataclass(frozen=True)
class RuntimeHealth:
    """Whether requests are sent to it, and if not, why."""

    usable: bool
    reason: str


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
        traced: traces what is sent to it.

    Attributes:
        name: host and port, by which it is known in logs and metrics.
        calls: how many requests it has of this service.
    """

    def __init__(self, settings: Settings, metrics: Metrics, traced: Traced | None) -> None:
        url = settings.runtime_url
        self.name = f"{url.host}:{url.port}"
        self.client = RuntimeClient(url, self.name, settings, traced)
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
    def health(self) -> RuntimeHealth:
        readiness = self.monitor.readiness
        if readiness.ready and self.breaker.state is BreakerState.OPEN:
            return RuntimeHealth(usable=False, reason="The runtime has failed several times in a row.")
        return RuntimeHealth(readiness.ready, readiness.reason)

    @property
    def state(self) -> RuntimeState:
        health = self.health
        return RuntimeState(self.name, health.usable, self.breaker.state, self.model, health.reason)

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
    """One request to the runtime, until ``end``."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._permit = runtime.breaker.permit()
        self._ended = False
        runtime.calls += 1

    async def send(self, request: RuntimeRequest) -> Answer:
        """Send it, and wait for the head of the answer, which the caller closes.

        Raises:
            RuntimeFailure: there is none. The call has ended.
        """
        try:
            answer = await self.runtime.client.send(request)
        except RuntimeFailure as failure:
            self.failed(failure)
            self.end()
            raise
        except BaseException:
            self.end()
            raise
        return Answer(answer, self)

    def begun(self) -> None:
        """The runtime has begun its answer."""
        self._permit.begun()

    def answered(self) -> None:
        """The runtime has given its answer."""
        self._permit.answered()

    def failed(self, failure: RuntimeFailure, *, balanced: bool = False) -> None:
        """The runtime gives no answer, or no more of it.

        Args:
            balanced: it is one of several behind a balancer. The others may be well.
        """
        self.runtime.monitor.ask_now()
        # An answer that was too long is no failure.
        if not balanced and failure.code != "request_timeout":
            self._permit.failed()

    def end(self) -> None:
        """It is over. After the first time nothing happens."""
        if not self._ended:
            self._ended = True
            self._permit.drop()
            self.runtime.calls -= 1


class Answer:
    """A runtime's answer, whose call ends when it is closed."""

    def __init__(self, answer: RuntimeAnswer, call: Call) -> None:
        self._answer = answer
        self._call = call
        self.status = answer.status
        self.headers = answer.headers
        self.is_event_stream = answer.is_event_stream
        self._balanced = any(name.lower() == RUNTIME_HEADER for name, _ in answer.headers)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, as it arrives. Raises RuntimeFailure if no more of it is to come."""
        begun = False
        try:
            async for chunk in self._answer.chunks():
                if not begun and self.status != UNAVAILABLE:
                    begun = True
                    self._call.begun()
                yield chunk
        except RuntimeFailure as failure:
            self._call.failed(failure, balanced=self._balanced)
            raise
        if self.status != UNAVAILABLE:
            self._call.answered()

    async def read(self) -> bytes:
        """The whole body. Raises as ``chunks`` does."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def close(self) -> None:
        """Close the connection. Before its end that aborts the generation."""
        try:
            await self._answer.close()
        finally:
            self._call.end()
