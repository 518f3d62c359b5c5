"""Knows whether the runtime answers, by asking it again and again."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from winnow_service.errors import RuntimeFailure
from winnow_service.metrics import Metrics
from winnow_service.runtime.client import RuntimeClient
from winnow_service.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Readiness:
    """Whether the runtime answered when last asked, and if not, why."""

    ready: bool
    reason: str


class RuntimeMonitor:
    """Holds the runtime's ``readiness`` while ``run`` runs.

    Attributes:
        starts: how often it has become ready. What it told before the last time may no longer hold.
    """

    def __init__(self, client: RuntimeClient, metrics: Metrics, settings: Settings) -> None:
        self._client = client
        self._metrics = metrics
        self._settings = settings
        self._ask_now = asyncio.Event()
        self.readiness = Readiness(ready=False, reason="The runtime has not been asked yet.")
        self.starts = 0

    async def run(self) -> None:
        """Ask for ever; ends when cancelled."""
        while True:
            self._ask_now.clear()
            readiness = await self._ask()
            if readiness != self.readiness:
                logger.info("Runtime %s: %s", "ready" if readiness.ready else "not ready", readiness.reason)
            self.starts += readiness.ready and not self.readiness.ready
            self.readiness = readiness
            self._metrics.runtime_ready.set(readiness.ready)
            try:
                await asyncio.wait_for(self._ask_now.wait(), self._settings.readiness_interval_seconds)
            except TimeoutError:
                continue

    def ask_now(self) -> None:
        """Do not wait for the next interval: a request has just failed."""
        self._ask_now.set()

    async def _ask(self) -> Readiness:
        path = self._settings.readiness_path
        try:
            status = (await self._client.get(path, self._settings.readiness_timeout_seconds)).status_code
        except RuntimeFailure as failure:
            return Readiness(ready=False, reason=failure.message)
        if status != 200:
            return Readiness(ready=False, reason=f"The runtime answered {path} with status {status}.")
        return Readiness(ready=True, reason="The runtime answers.")
