"""Measuring what is kept: policies and keys, how old the knowledge of them is, and what the store does."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from winnow_service.errors import StoreUnavailable
from winnow_service.keys.keyring import Keyring
from winnow_service.metrics.instruments import Metrics
from winnow_service.policies.registry import PolicyRegistry
from winnow_service.store.documents import Changes, Document, Expected, Store
from winnow_service.store.mirror import Mirror


class StateCollector(Collector):
    """Reads gauges off the parts of the service."""

    def __init__(self, mirror: Mirror, policies: PolicyRegistry, keyring: Keyring) -> None:
        self._mirror = mirror
        self._policies = policies
        self._keyring = keyring

    def collect(self) -> Iterator[Metric]:
        health, age = self._mirror.health, self._mirror.age_seconds
        yield GaugeMetricFamily(
            "winnow_store_reachable", "1 if the store answered when last asked, else 0.", health.healthy
        )
        yield GaugeMetricFamily(
            "winnow_store_mirror_age_seconds", "Since the store was last read; +Inf if it never was.", age
        )
        policies = GaugeMetricFamily(
            "winnow_stored_policies",
            "Policies in the store, by the kind of their decode policy; 'unreadable' if this version cannot serve it.",
            labels=["decode_policy"],
        )
        keys = GaugeMetricFamily(
            "winnow_keys",
            "Keys in the store, by state: valid, expired, or unreadable for this version.",
            labels=["state"],
        )
        for family, counted in ((policies, self._policies.count_stored()), (keys, self._keyring.count_by_state())):
            for label, number in counted.items():
                family.add_metric([label], number)
            yield family
        yield GaugeMetricFamily(
            "winnow_open", "1 as long as requests need no key, because there has never been one.", self._keyring.is_open
        )


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
