"""The shared store: Redis, for more than one service."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from redis.asyncio.client import Redis
from redis.exceptions import BusyLoadingError, ResponseError

from winnow_service.errors import StoreUnavailable
from winnow_service.store.documents import KEPT_REVISIONS, Changes, Conflict, Document, Expected, Store
from winnow_service.store.redis_connection import RedisConnection

logger = logging.getLogger(__name__)

# Documents are "revision version milliseconds author\nvalue"; a deleted one has no value.
_WRITE = """
local documents, changes, version_key, revisions = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local field, expected, author, value, kept, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local current = redis.call('HGET', documents, field)
local revision = current and tonumber(string.match(current, '^%d+')) or 0
local exists = current and string.sub(current, -1) ~= '\\n' or false
local as_expected
if expected == 'absent' then as_expected = not exists
elseif expected == 'present' then as_expected = exists
else as_expected = exists and revision == tonumber(expected) end
if not as_expected then return {0, current or ''} end
local time = redis.call('TIME')
local milliseconds = time[1] * 1000 + math.floor(time[2] / 1000)
local version = redis.call('INCR', version_key)
local written = string.format('%d %d %.0f %s\\n%s', revision + 1, version, milliseconds, author, value)
redis.call('HSET', documents, field, written)
redis.call('ZADD', changes, version, field)
redis.call('LPUSH', revisions, written)
redis.call('LTRIM', revisions, 0, kept - 1)
redis.call('PUBLISH', channel, version)
return {1, written}
"""
# WAITAOF came with 7.2.
_FIRST_THAT_WAITS = (7, 2)
# Redis syncs once a second, or at every write.
_SYNC_MILLISECONDS = 1500
_FETCHED_AT_ONCE = 1000


class RedisStore(Store):
    """Documents in Redis. A write is acknowledged once the append-only file has it, where Redis can say so.

    Redis with an append-only file synced at every write has it before it answers. From 7.2 on Redis is asked to wait,
    however often it syncs.

    Attributes:
        connection: to the server that takes writes, for whatever else is kept in Redis.
    """

    def __init__(self, connection: RedisConnection) -> None:
        self.connection = connection
        prefix = connection.prefix
        self._documents = f"{prefix}documents"
        self._changes = f"{prefix}changes"
        self._version = f"{prefix}version"
        self._revisions = f"{prefix}revisions:"
        self._channel = f"{prefix}changed"
        self._listening: asyncio.Task[None] | None = None
        self._notified = asyncio.Event()
        self._can_wait = False
        # After a failure Redis may be another server than before, one that has lost writes or has others.
        self._same_server = False

    async def changes(self, since: int) -> Changes:
        complete = since == 0 or not self._same_server
        async with self._use() as client:
            if not self._same_server:
                self._can_wait = await _can_wait(client)
            version = int(await client.get(self._version) or 0)
            if version < since:
                complete = True
            fields = await self._all(client) if complete else await self._changed(client, since)
            self._same_server = True
        return Changes(version, [_document(field, text) for field, text in fields.items()], complete)

    async def write(
        self, collection: str, name: str, value: dict[str, Any] | None, expected: Expected, author: str
    ) -> Document:
        field = f"{collection}/{name}"
        keys = [self._documents, self._changes, self._version, self._revisions + field]
        text = "" if value is None else json.dumps(value, separators=(",", ":"))
        arguments = [field, str(expected), author, text, str(KEPT_REVISIONS), self._channel]
        async with self._use() as client:
            # A pipeline has one connection, and only that one can wait for what it has written.
            pipeline = client.pipeline(transaction=False)
            pipeline.eval(_WRITE, len(keys), *keys, *arguments)
            if self._can_wait:
                pipeline.execute_command("WAITAOF", 1, 0, _SYNC_MILLISECONDS)
            (written, state), *synced = await pipeline.execute()
        if not written:
            raise Conflict(_document(field, state) if state else None)
        if synced and synced[0][0] < 1:
            raise StoreUnavailable("it was written, but Redis does not say that it is on disk")
        return _document(field, state)

    async def revisions(self, collection: str, name: str) -> list[Document]:
        field = f"{collection}/{name}"
        async with self._use() as client:
            texts: Any = await client.lrange(self._revisions + field, 0, -1)
        return [_document(field, text) for text in texts]

    async def wait_for_change(self, timeout_seconds: float) -> None:
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())
        # Without a message too: Redis does not promise to deliver them.
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._notified.wait()
        self._notified.clear()
        if self._listening.done():
            listened, self._listening = self._listening, None
            self._same_server = False
            listened.result()

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            # How it ended is of no interest now: an exception that nobody has seen would be logged.
            await asyncio.gather(self._listening, return_exceptions=True)
        await self.connection.close()

    @asynccontextmanager
    async def _use(self) -> AsyncIterator[Redis]:
        try:
            async with self.connection.use() as client:
                yield client
        except StoreUnavailable:
            self._same_server = False
            raise

    async def _all(self, client: Redis) -> dict[str, str]:
        fields: Any = await client.hgetall(self._documents)
        return dict(fields)

    async def _changed(self, client: Redis, since: int) -> dict[str, str]:
        fields: Any = await client.zrange(self._changes, since + 1, "+inf", byscore=True)
        found: dict[str, str] = {}
        for first in range(0, len(fields), _FETCHED_AT_ONCE):
            part = fields[first : first + _FETCHED_AT_ONCE]
            texts: Any = await client.hmget(self._documents, part)
            # Winnow leaves a trace of what it deletes: what is gone without one was never there.
            found.update({field: text for field, text in zip(part, texts, strict=True) if text is not None})
        return found

    async def _listen(self) -> None:
        """Note every message; ends with an error when the connection does."""
        try:
            async with self.connection.use() as client:
                subscription = client.pubsub()
                try:
                    await subscription.subscribe(self._channel)
                    async for _ in subscription.listen():
                        self._notified.set()
                finally:
                    await subscription.aclose()  # type: ignore[no-untyped-call]
        finally:
            self._notified.set()


async def _can_wait(client: Redis) -> bool:
    """Whether Redis can be asked to wait until a write is on disk."""
    try:
        server = await client.info("server")
        persistence = await client.info("persistence")
    except ResponseError as error:
        logger.warning("Redis does not tell whether it keeps an append-only file: %s", error)
        return False
    if persistence.get("loading"):
        # Until its append-only file is read Redis says that it keeps none.
        raise BusyLoadingError("Redis is loading its data")
    if not persistence.get("aof_enabled"):
        logger.warning("Redis keeps no append-only file: policies and keys may be lost when it ends")
        return False
    return tuple(map(int, str(server["redis_version"]).split(".")[:2])) >= _FIRST_THAT_WAITS


def _document(field: str, text: str) -> Document:
    collection, _, name = field.partition("/")
    head, _, value = text.partition("\n")
    try:
        revision, version, milliseconds = map(int, head.split(" ")[:3])
        author = head.split(" ", 3)[3]
        content = json.loads(value) if value else None
    except (ValueError, IndexError):
        raise StoreUnavailable(f"Redis has a document {field!r} that Winnow has not written") from None
    return Document(collection, name, revision, version, content, milliseconds / 1000, author)
