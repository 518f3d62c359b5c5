"""Measuring the store: one that counts what another does."""

from __future__ import annotations

from winnow_service.errors import StoreUnavailable
from winnow_service.metrics.instruments import Metrics
from winnow_service.store.documents import Changes, Document, Expected, Store


class MeasuredStore(Store):
    """Does what ``store`` does, and counts it."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics

    async def changes(self, since: int) -> Changes:
        try:
            changes = await self._store.changes(since)
        except StoreUnavailable:
            self._metrics.store_read_errors.inc()
            raise
        for document in changes.documents:
            self._metrics.store_revisions_read.labels(document.collection).inc()
        return changes

    async def write(
        self, collection: str, name: str, value: dict[str, object] | None, expected: Expected, author: str
    ) -> Document:
        try:
            with self._metrics.store_write_duration.time():
                document = await self._store.write(collection, name, value, expected, author)
        except StoreUnavailable:
            self._metrics.store_write_errors.labels(collection).inc()
            raise
        self._metrics.store_writes.labels(collection).inc()
        return document

    async def revisions(self, collection: str, name: str) -> list[Document]:
        return await self._store.revisions(collection, name)

    async def wait_for_change(self, timeout_seconds: float) -> None:
        await self._store.wait_for_change(timeout_seconds)

    async def close(self) -> None:
        await self._store.close()
