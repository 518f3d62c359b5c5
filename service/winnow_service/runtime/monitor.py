"""Knows whether a runtime answers, by asking it again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json

from winnow_service.errors import RuntimeFailure
from winnow_service.runtime.client import RuntimeClient, authorization
from winnow_service.runtime.fields import FieldsCheck
from winnow_service.settings import Settings

logger = logging.getLogger(__name__)

_MODELS_PATH: Final = "/v1/models"
_LONGEST_NAME: Final = 128


@dataclass(frozen=True)
class Readiness:
    """Whether the runtime answered when last asked, and if not, why."""

    ready: bool
    reason: str


_NOT_ASKED: Final = Readiness(ready=False, reason="The runtime has not been asked yet.")


class RuntimeMonitor:
    """Holds the runtime's ``readiness`` while ``run`` runs.

    Args:
        changed: called when ``readiness`` or ``model`` is another than before.

    Attributes:
        model: the name of the model that it served last; None if it never told.
        starts: how often it has become ready. What it told before the last time may no longer hold.
    """

    def __init__(self, client: RuntimeClient, settings: Settings, changed: Callable[[], None]) -> None:
        self._client = client
        self._settings = settings
        self._changed = changed
        self._ask_now = asyncio.Event()
        self._headers = authorization(settings)
        self._fields = FieldsCheck(client, self._headers)
        self.readiness = _NOT_ASKED
        self.model: str | None = None
        self.starts = 0

    async def run(self) -> None:
        """Ask for ever; ends when cancelled."""
        while True:
            self._ask_now.clear()
            readiness = await self._passing(await self._ask())
            if readiness != self.readiness:
                state = "ready" if readiness.ready else "not ready"
                logger.info("Runtime %s %s: %s", self._client.name, state, readiness.reason)
                if readiness.ready:
                    self.model = await self._ask_model()
                    self.starts += 1
                self.readiness = readiness
                self._changed()
            elif readiness.ready and self.model is None:
                self.model = await self._ask_model()
                if self.model is not None:
                    self._changed()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.readiness_interval_seconds):
                    await self._ask_now.wait()

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

    async def _passing(self, readiness: Readiness) -> Readiness:
        """What ``readiness`` is if requests do not come to the runtime as they are sent."""
        if not readiness.ready:
            self._fields.forget()
            return readiness
        lost = await self._fields.lost()
        return readiness if lost is None else Readiness(ready=False, reason=lost)

    async def _ask_model(self) -> str | None:
        try:
            answer = await self._client.get(_MODELS_PATH, self._settings.readiness_timeout_seconds, self._headers)
            # The first is the model itself, those after it are its adapters.
            reported: Any = from_json(answer.content)
            return str(reported["data"][0]["id"])[:_LONGEST_NAME]
        except (RuntimeFailure, ValueError, LookupError, TypeError):
            return None
