"""One runtime behind the service, and the requests that are on their way to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from pydantic import AnyUrl

from winnow_service.errors import RuntimeFailure
from winnow_service.headers import RUNTIME_HEADER
from winnow_service.runtime.breaker import BreakerState, CircuitBreaker
from winnow_service.runtime.client import RuntimeAnswer, RuntimeClient, RuntimeRequest, Traced
from winnow_service.runtime.failures import RequestTimeout
from winnow_service.runtime.monitor import RuntimeMonitor
from winnow_service.runtime.served_model import ServedModelLookup
from winnow_service.settings import Settings

# What a runtime says that is alive, and has too much to do or is about to end.
UNAVAILABLE = 503


def name_of(url: AnyUrl) -> str:
    """Return host and port, by which a runtime is known in logs and metrics."""
    return f"{url.host}:{url.port}"


@dataclass(frozen=True)
class RuntimeHealth:
    """Whether requests are sent to it, and if not, why."""

    usable: bool
    reason: str


class Runtime:
    """What the service knows of one runtime.

    Attributes:
        name: host and port.
        calls: how many requests it has of this service.
    """

    def __init__(self, url: AnyUrl, settings: Settings, traced: Traced | None, changed: Callable[[], None]) -> None:
        self.name = name_of(url)
        self.client = RuntimeClient(url, self.name, settings, traced)
        self.breaker = CircuitBreaker(settings.breaker_failures, settings.breaker_open_seconds)
        self.monitor = RuntimeMonitor(self.client, settings, lambda: self._changed(changed))
        self.served = ServedModelLookup(self.client, self.monitor, settings.readiness_timeout_seconds)
        self.calls = 0

    @property
    def health(self) -> RuntimeHealth:
        readiness = self.monitor.readiness
        if readiness.ready and self.breaker.state is BreakerState.OPEN:
            return RuntimeHealth(usable=False, reason="The runtime has failed several times in a row.")
        return RuntimeHealth(readiness.ready, readiness.reason)

    def begin(self) -> Call:
        """Reserve a request, which the breaker must permit."""
        return Call(self)

    def _changed(self, tell: Callable[[], None]) -> None:
        if self.monitor.readiness.ready:
            self.breaker.try_now()
        tell()


class Call:
    """One request to a runtime, from when the runtime is chosen until ``end``. Until then it is part of its load."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._trial = runtime.breaker.begin()
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
        self._trial.begun()

    def answered(self) -> None:
        """The runtime has given its answer."""
        self._trial.answered()

    def failed(self, failure: RuntimeFailure, *, balanced: bool = False) -> None:
        """The runtime gives no answer, or no more of it.

        Args:
            balanced: it is one of several behind a balancer. The others may be well.
        """
        self.runtime.monitor.ask_now()
        # An answer that was too long is no failure.
        if not balanced and not isinstance(failure, RequestTimeout):
            self._trial.failed()

    def end(self) -> None:
        """It is over. After the first time nothing happens."""
        if not self._ended:
            self._ended = True
            self._trial.drop()
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

    @property
    def runtime(self) -> Runtime:
        return self._call.runtime

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
