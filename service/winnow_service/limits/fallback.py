"""Limits while Redis comes and goes: of all replicas together while it is there, of each replica while it is away."""

from __future__ import annotations

import logging

from winnow_service.errors import StoreUnavailable
from winnow_service.limits.limiter import Limiter, Limits, Reservation
from winnow_service.store.mirror import Mirror

logger = logging.getLogger(__name__)


class FallbackLimiter(Limiter):
    """Counts in ``shared`` while the store answers, else in ``own``."""

    def __init__(self, shared: Limiter, own: Limiter, mirror: Mirror) -> None:
        self._shared = shared
        self._own = own
        self._mirror = mirror
        self._own_leases: set[str] = set()

    async def admit(self, key_id: str, limits: Limits, tokens: int) -> Reservation:
        # No request waits for a store that is known to be away.
        if self._mirror.health.healthy:
            try:
                return await self._shared.admit(key_id, limits, tokens)
            except StoreUnavailable as error:
                logger.warning("The limits of the key %s hold in this replica alone: %s", key_id, error.detail)
        reservation = await self._own.admit(key_id, limits, tokens)
        self._own_leases.add(reservation.lease)
        return reservation

    async def settle(self, reservation: Reservation, tokens: int) -> None:
        if reservation.lease in self._own_leases:
            self._own_leases.discard(reservation.lease)
            await self._own.settle(reservation, tokens)
            return
        try:
            await self._shared.settle(reservation, tokens)
        except StoreUnavailable as error:
            logger.warning("What a request of the key %s used is not known: %s", reservation.key_id, error.detail)

    async def run(self) -> None:
        await self._shared.run()
