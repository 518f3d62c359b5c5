"""Limits of all replicas together, counted in Redis: each admission is one script, and scripts are atomic.

While Redis is away, each replica counts by itself.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final
from uuid import uuid4

from winnow_service.errors import StoreUnavailable
from winnow_service.limits.limiter import (
    BUCKET_SECONDS,
    BUCKETS,
    CONCURRENT,
    REQUESTS,
    TOKENS,
    Limiter,
    Limits,
    QuotaStatus,
    Reservation,
    judge,
    quotas,
    rate_limit_headers,
)
from winnow_service.store.mirror import Mirror
from winnow_service.store.redis_connection import RedisConnection

logger = logging.getLogger(__name__)

_BUCKET_MILLISECONDS: Final = int(BUCKET_SECONDS * 1000)
# What a replica that was killed holds is free again after this.
_LEASE_MILLISECONDS: Final = 30_000
_RENEWED_EVERY_SECONDS: Final = 10.0

_CLOCK = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local size, count = tonumber(ARGV[1]), tonumber(ARGV[2])
local current = math.floor(now / size)
"""

# Quotas of 0 are none. Answers which bucket the use was counted in (-1 if it was not), then for requests and for tokens
# what was used, and the milliseconds until all of it and until enough of it is free; then how many requests there are.
_ADMIT = """
local lease, ends = ARGV[3], tonumber(ARGV[4])
local quotas = {tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])}
local needs = {1, tonumber(ARGV[8])}
local answer, admitted = {-1}, true
for which = 1, 2 do
  local used, buckets, wait, reset = 0, {}, 0, 0
  local stored = redis.call('HGETALL', KEYS[which])
  for at = 1, #stored, 2 do
    local bucket, amount = tonumber(stored[at]), tonumber(stored[at + 1])
    -- Later than now: the clock was put back.
    if bucket < current - count or bucket > current then redis.call('HDEL', KEYS[which], stored[at])
    else used = used + amount; buckets[#buckets + 1] = {bucket, amount} end
  end
  table.sort(buckets, function(a, b) return a[1] < b[1] end)
  if #buckets > 0 then reset = (buckets[#buckets][1] + count + 1) * size - now end
  local excess = used + needs[which] - quotas[which]
  if quotas[which] > 0 and excess > 0 then
    admitted = false
    for _, each in ipairs(buckets) do
      excess = excess - each[2]
      if excess <= 0 then wait = (each[1] + count + 1) * size - now; break end
    end
  end
  for _, value in ipairs({used, reset, wait}) do answer[#answer + 1] = value end
end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
local concurrent = redis.call('ZCARD', KEYS[3])
answer[#answer + 1] = concurrent
if quotas[3] > 0 and concurrent >= quotas[3] then admitted = false end
if admitted then
  answer[1] = current
  for which = 1, 2 do
    if quotas[which] > 0 then
      redis.call('HINCRBY', KEYS[which], current, needs[which])
      redis.call('PEXPIRE', KEYS[which], (count + 2) * size)
    end
  end
  if quotas[3] > 0 then
    redis.call('ZADD', KEYS[3], now + ends, lease)
    redis.call('PEXPIRE', KEYS[3], ends)
  end
end
return answer
"""
_SETTLE = """
local lease, bucket, more = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
redis.call('ZREM', KEYS[2], lease)
if bucket < current - count or bucket > current then
  if more < 0 then return end
  bucket = current
end
if more ~= 0 then
  redis.call('HINCRBY', KEYS[1], bucket, more)
  redis.call('PEXPIRE', KEYS[1], (count + 2) * size)
end
"""
_RENEW = """
for at = 4, #ARGV do redis.call('ZADD', KEYS[1], 'XX', now + ARGV[3], ARGV[at]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
"""


class RedisLimiter(Limiter):
    """Counts in Redis. Every method may raise StoreUnavailable."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        # What requests being answered hold of limits on requests at once.
        self._held: dict[str, set[str]] = {}

    async def admit(self, key_id: str, limits: Limits, tokens: int) -> Reservation:
        amounts = [limits.requests_per_minute or 0, limits.tokens_per_minute or 0, limits.concurrent_requests or 0]
        lease = uuid4().hex
        keys = [self._key(limit, key_id) for limit in (REQUESTS, TOKENS, CONCURRENT)]
        answer = await self._run(_ADMIT, keys, lease, _LEASE_MILLISECONDS, *amounts, tokens)
        bucket, *numbers = map(int, answer)
        statuses = [_status(limit, quota, needed, numbers) for limit, quota, needed in quotas(limits, tokens)]
        judge(statuses)
        if limits.concurrent_requests is not None:
            self._held.setdefault(key_id, set()).add(lease)
        return Reservation(key_id, lease, bucket, tokens, rate_limit_headers(statuses, admitted=True))

    async def settle(self, reservation: Reservation, tokens: int) -> None:
        leases = self._held.get(reservation.key_id, set())
        if reservation.lease not in leases and tokens == reservation.tokens:
            return
        leases.discard(reservation.lease)
        if not leases:
            self._held.pop(reservation.key_id, None)
        keys = [self._key(limit, reservation.key_id) for limit in (TOKENS, CONCURRENT)]
        await self._run(_SETTLE, keys, reservation.lease, reservation.bucket, tokens - reservation.tokens)

    async def run(self) -> None:
        """Renew what requests hold as long as they are being answered."""
        while True:
            await asyncio.sleep(_RENEWED_EVERY_SECONDS)
            for key_id, leases in list(self._held.items()):
                try:
                    await self._run(_RENEW, [self._key(CONCURRENT, key_id)], _LEASE_MILLISECONDS, *leases)
                except StoreUnavailable as error:
                    logger.warning("Requests of the key %s are not counted: %s", key_id, error.detail)

    def _key(self, limit: str, key_id: str) -> str:
        return f"{self._connection.prefix}limit:{limit}:{key_id}"

    async def _run(self, script: str, keys: list[str], *arguments: str | int) -> Any:
        async with self._connection.use() as client:
            return await client.register_script(_CLOCK + script)(
                keys=keys, args=[_BUCKET_MILLISECONDS, BUCKETS, *arguments]
            )


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


def _status(limit: str, quota: int, needed: int, numbers: list[int]) -> QuotaStatus:
    if limit == CONCURRENT:
        return QuotaStatus(limit, quota, numbers[6], needed)
    used, reset, wait = numbers[:3] if limit == REQUESTS else numbers[3:6]
    return QuotaStatus(limit, quota, used, needed, reset / 1000, wait / 1000)
