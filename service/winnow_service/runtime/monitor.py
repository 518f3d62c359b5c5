"""Knows whether the runtime answers, by asking it again and again."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json

from winnow_service.errors import RuntimeFailure
from winnow_service.metrics.instruments import Metrics
from winnow_service.runtime.client import RuntimeClient
from winnow_service.settings import Settings

logger = logging.getLogger(__name__)

_MODELS_PATH: Final = "/v1/models"
_UNKNOWN_MODEL: Final = "unknown"
_LONGEST_NAME: Final = 128


@dataclass(frozen=True)
class Readiness:
    """Whether the runtime answered when last asked, and if not, why."""

    ready: bool
    reason: str


class RuntimeMonitor:
    """Holds the runtime's ``readiness`` while ``run`` runs.

    Attributes:
        model: the name of the served model; "unknown" if the runtime does not tell.
        starts: how often it has become ready. What it told before the last time may no longer hold.
    """

    def __init__(self, client: RuntimeClient, metrics: Metrics, settings: Settings) -> None:
        self._client = client
        self._metrics = metrics
        self._settings = settings
        self._ask_now = asyncio.Event()
        self.readiness = Readiness(ready=False, reason="The runtime has not been asked yet.")
        self.model = _UNKNOWN_MODEL
        self.starts = 0

    async def run(self) -> None:
        """Ask for ever; ends when cancelled."""
        while True:
            self._ask_now.clear()
            readiness = await self._ask()
            if readiness != self.readiness:
                logger.info("Runtime %s: %s", "ready" if readiness.ready else "not ready", readiness.reason)
            if readiness.ready and not self.readiness.ready:
                self.model = await self._ask_model()
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

    async def _ask_model(self) -> str:
        key = self._settings.runtime_api_key
        headers = {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
        try:
            answer = await self._client.get(_MODELS_PATH, self._settings.readiness_timeout_seconds, headers)
            # The first is the model itself, those after it are its adapters.
            told: Any = from_json(answer.content)
            return str(told["data"][0]["id"])[:_LONGEST_NAME]
        except (RuntimeFailure, ValueError, LookupError, TypeError):
            return _UNKNOWN_MODEL
