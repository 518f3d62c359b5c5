"""What the service knows when Prometheus asks: policies, keys, and how old that knowledge is."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from winnow_service.keys.keyring import Keyring
from winnow_service.policies.registry import PolicyRegistry
from winnow_service.store.mirror import Mirror


class StateCollector(Collector):
    """Reads gauges off the parts of the service."""

    def __init__(self, mirror: Mirror, policies: PolicyRegistry, keyring: Keyring) -> None:
        self._mirror = mirror
        self._policies = policies
        self._keyring = keyring

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "winnow_store_reachable",
            "1 if the store answered when last asked, else 0.",
            float(self._mirror.health.healthy),
        )
        yield GaugeMetricFamily(
            "winnow_store_mirror_age_seconds",
            "Since the store was last read; +Inf if it never was.",
            self._mirror.age_seconds,
        )
        policies = GaugeMetricFamily(
            "winnow_stored_policies",
            "Policies in the store, by the kind of their decode policy; 'unreadable' if this version cannot serve it.",
            labels=["decode_policy"],
        )
        for kind, number in self._policies.count_stored().items():
            policies.add_metric([kind], number)
        yield policies
        keys = GaugeMetricFamily(
            "winnow_keys",
            "Keys in the store, by state: valid, expired, or unreadable for this version.",
            labels=["state"],
        )
        for state, number in self._keyring.count_by_state().items():
            keys.add_metric([state], number)
        yield keys
        yield GaugeMetricFamily(
            "winnow_open", "1 as long as requests need no key, because there has never been one.", self._keyring.is_open
        )
