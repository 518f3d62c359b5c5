"""Which runtimes there are: those that the settings list, and those found behind the names in the list."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from pydantic import AnyUrl

from winnow_service.metrics.instruments import Metrics
from winnow_service.runtime.breaker import BreakerState
from winnow_service.runtime.discovery import DNS_SCHEME, Discovery, DiscoveryState, Resolve
from winnow_service.runtime.runtime import Runtime, name_of
from winnow_service.settings import Settings

logger = logging.getLogger(__name__)


class Members:
    """Holds the runtimes while ``run`` runs. One whose address is gone leaves: it gets no new requests, and those that
    it has are answered to their end.

    Args:
        make: returns the runtime at an address.

    Attributes:
        current: in the order of the settings.
    """

    def __init__(
        self, settings: Settings, metrics: Metrics, make: Callable[[AnyUrl], Runtime], resolve: Resolve
    ) -> None:
        self._metrics = metrics
        self._make = make
        self._interval_seconds = settings.runtime_dns_interval_seconds
        self._listed = [
            Discovery(url, metrics, resolve) if url.scheme == DNS_SCHEME else url for url in settings.runtime_urls
        ]
        self._leaving: dict[str, Runtime] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self.current: Sequence[Runtime] = ()
        self._update()

    @property
    def discovered(self) -> list[DiscoveryState]:
        """What is known of the names in the list."""
        return [each.state for each in self._discoveries()]

    @property
    def leaving_calls(self) -> int:
        """How many requests those have that leave."""
        return sum(runtime.calls for runtime in self._leaving.values())

    async def run(self) -> None:
        """Watch runtimes, and look up names, for ever; ends when cancelled."""
        async with asyncio.TaskGroup() as group:
            self._watch(group)
            for discovery in self._discoveries():
                group.create_task(self._follow(discovery, group))

    async def close(self) -> None:
        for runtime in (*self.current, *self._leaving.values()):
            await runtime.client.close()

    async def _follow(self, discovery: Discovery, group: asyncio.TaskGroup) -> None:
        while True:
            await discovery.refresh()
            self._update()
            self._watch(group)
            await self._close_idle()
            await asyncio.sleep(self._interval_seconds)

    def _discoveries(self) -> Iterator[Discovery]:
        return (each for each in self._listed if isinstance(each, Discovery))

    def _update(self) -> None:
        """Let runtimes come and go as the names now say."""
        urls: dict[str, AnyUrl] = {}
        for each in self._listed:
            for url in each.urls if isinstance(each, Discovery) else (each,):
                urls.setdefault(name_of(url), url)
        known = {runtime.name: runtime for runtime in self.current}
        for name in known.keys() - urls.keys():
            self._leaving[name] = known[name]
            self._leave(known[name])
        self.current = [known.get(name) or self._join(name, url) for name, url in urls.items()]

    def _join(self, name: str, url: AnyUrl) -> Runtime:
        # It may be back before its last request has ended.
        runtime = self._leaving.pop(name, None) or self._make(url)
        self._metrics.runtime_ready.labels(name).set_function(lambda: runtime.monitor.readiness.ready)
        self._metrics.runtime_calls.labels(name).set_function(lambda: runtime.calls)
        for state in BreakerState:
            self._metrics.breaker_state.labels(name, state).set_function(
                lambda state=state: runtime.breaker.state is state  # type: ignore[misc]
            )
        return runtime

    def _leave(self, runtime: Runtime) -> None:
        logger.info("Runtime %s has left, and answers %d requests to their end", runtime.name, runtime.calls)
        runtime.monitor.forget()
        self._metrics.runtime_ready.remove(runtime.name)
        for state in BreakerState:
            self._metrics.breaker_state.remove(runtime.name, state)

    def _watch(self, group: asyncio.TaskGroup) -> None:
        runtimes = {runtime.name: runtime for runtime in self.current}
        for name in self._watches.keys() - runtimes.keys():
            self._watches.pop(name).cancel()
        for name in runtimes.keys() - self._watches.keys():
            self._watches[name] = group.create_task(runtimes[name].monitor.run())

    async def _close_idle(self) -> None:
        for name in [name for name, runtime in self._leaving.items() if not runtime.calls]:
            runtime = self._leaving.pop(name)
            self._metrics.runtime_calls.remove(name)
            await runtime.client.close()
