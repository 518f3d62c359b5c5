"""All runtimes behind the service: which of them gets a request, and whether any of them answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import AnyUrl

from winnow_service.errors import RuntimeUnavailable
from winnow_service.metrics.instruments import Metrics
from winnow_service.runtime.balancer import choose, rank
from winnow_service.runtime.breaker import BreakerState
from winnow_service.runtime.client import Traced
from winnow_service.runtime.discovery import DiscoveryState, Resolve, resolve
from winnow_service.runtime.failures import CircuitOpen
from winnow_service.runtime.members import Members
from winnow_service.runtime.runtime import Call, Runtime, RuntimeHealth
from winnow_service.settings import Settings

_UNKNOWN_MODEL: Final = "unknown"


@dataclass(frozen=True)
class RuntimeState:
    """One runtime as operators see it.

    Attributes:
        usable: whether requests are sent to it; if not, ``reason`` says why.
    """

    name: str
    usable: bool
    breaker: BreakerState
    model: str
    reason: str


class RuntimePool:
    """The runtimes that ``settings`` name, in that order. ``run`` watches them, and finds those behind names.

    They must serve one model: that of the first in the order which has told its model. Others are left out.

    Args:
        traced: traces what is sent to them.
        resolve: looks up names.
    """

    def __init__(self, settings: Settings, metrics: Metrics, traced: Traced | None, resolve: Resolve = resolve) -> None:
        self._factor = settings.affinity_load_factor
        self._max_running = settings.max_running
        self._metrics = metrics
        self._told: list[Callable[[], None]] = []

        def runtime_at(url: AnyUrl) -> Runtime:
            return Runtime(url, settings, traced, self._changed)

        self._members = Members(settings, metrics, runtime_at, resolve)

    @property
    def model(self) -> str:
        """The name of the served model; "unknown" if no runtime has told it."""
        return self._model or _UNKNOWN_MODEL

    @property
    def capacity(self) -> int:
        """How many requests may run at once."""
        # When none answers, those who come learn it at once.
        usable = sum(self._health(runtime).usable for runtime in self._runtimes)
        # What those that leave still answer takes no room of the others.
        return self._max_running * max(1, usable) + self._members.leaving_calls

    @property
    def health(self) -> RuntimeHealth:
        """Whether any is usable, and why those are not that are not."""
        health = {runtime.name: self._health(runtime) for runtime in self._runtimes}
        usable = any(each.usable for each in health.values())
        lost = [f"{state.name}: {state.reason}" for state in self.discovered if not state.resolved]
        if len(health) == 1 and not lost:
            return next(iter(health.values()))
        away = lost + [f"{name}: {each.reason}" for name, each in health.items() if not each.usable]
        return RuntimeHealth(usable, " ".join(away) if away else "The runtimes answer.")

    @property
    def all_usable(self) -> bool:
        """Whether every runtime is, and every name could be looked up."""
        usable = all(self._health(runtime).usable for runtime in self._runtimes)
        return usable and all(state.resolved for state in self.discovered)

    @property
    def discovered(self) -> list[DiscoveryState]:
        """What is known of the names that stand for runtimes."""
        return self._members.discovered

    @property
    def states(self) -> list[RuntimeState]:
        return [
            RuntimeState(
                runtime.name,
                (health := self._health(runtime)).usable,
                runtime.breaker.state,
                runtime.monitor.model or _UNKNOWN_MODEL,
                health.reason,
            )
            for runtime in self._runtimes
        ]

    @property
    def typical(self) -> Runtime:
        """One to ask what all of them serve. Raises RuntimeUnavailable if none is known."""
        if not self._runtimes:
            raise _none_known()
        return next((runtime for runtime in self._matching() if self._health(runtime).usable), self._runtimes[0])

    def begin(self, prefix: bytes | None) -> Call:
        """Choose a runtime, and reserve a request to it.

        Args:
            prefix: what the request has in common with those whose cache it can use; None for none.

        Raises:
            CircuitOpen: none is asked now.
            RuntimeUnavailable: none is known.
        """
        if not self._runtimes:
            raise _none_known()
        call = self._begin(prefix, list(self._matching()))
        if call is None:
            raise CircuitOpen(min(runtime.breaker.retry_in for runtime in self._matching()))
        return call

    def begin_elsewhere(self, prefix: bytes | None, failed: Runtime) -> Call | None:
        """Choose one that answers, other than the ``failed`` one; None if there is none."""
        others = [each for each in self._matching() if each is not failed and self._health(each).usable]
        return self._begin(prefix, others)

    def when_changed(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called whenever one may have become usable."""
        self._told.append(tell)

    async def run(self) -> None:
        """Watch them for ever; ends when cancelled."""
        await self._members.run()

    async def close(self) -> None:
        await self._members.close()

    def _changed(self) -> None:
        for tell in self._told:
            tell()

    def _begin(self, prefix: bytes | None, candidates: list[Runtime]) -> Call | None:
        permitted = [runtime for runtime in candidates if runtime.breaker.permits]
        # One that does not answer when asked how it is may still answer requests.
        allowed = {each.name: each for each in permitted if each.monitor.readiness.ready} or {
            each.name: each for each in permitted
        }
        if not allowed:
            return None
        if len(allowed) == 1 or prefix is None:
            return min(allowed.values(), key=lambda each: each.calls).begin()
        ranking = rank(prefix, list(allowed))
        name = choose(ranking, {name: each.calls for name, each in allowed.items()}, self._factor)
        self._metrics.balanced.labels("affine" if name == ranking[0] else "load").inc()
        return allowed[name].begin()

    @property
    def _runtimes(self) -> Sequence[Runtime]:
        return self._members.current

    @property
    def _model(self) -> str | None:
        return next((runtime.monitor.model for runtime in self._runtimes if runtime.monitor.model is not None), None)

    def _matching(self) -> Iterator[Runtime]:
        model = self._model
        return (runtime for runtime in self._runtimes if runtime.monitor.model == model or not runtime.monitor.starts)

    def _health(self, runtime: Runtime) -> RuntimeHealth:
        own, model = runtime.monitor.model, self._model
        if not runtime.monitor.readiness.ready or own == model:
            return runtime.health
        serves = "does not tell its model" if own is None else f"serves the model {own}"
        return RuntimeHealth(usable=False, reason=f"The runtime {serves}, and the first that told it {model}.")


def _none_known() -> RuntimeUnavailable:
    return RuntimeUnavailable("no address of one is known")
