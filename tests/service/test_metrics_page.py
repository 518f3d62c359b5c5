"""docs/metrics.md says what the code has: metrics, alerts, dashboards."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from prometheus_client import Metric

from winnow_service.app import store_of
from winnow_service.keys.keyring import Keyring
from winnow_service.metrics.instruments import Metrics
from winnow_service.metrics.state import StateCollector
from winnow_service.policies.registry import PolicyRegistry
from winnow_service.proxy.generation import Outcome
from winnow_service.settings import Settings
from winnow_service.store.mirror import Mirror

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/metrics.md").read_text()


def rows() -> list[str]:
    """Every metric as the page's table has it. When the table is out of date, paste these."""
    metrics = Metrics()
    known = {collector: collector for collector in metrics.registry._collector_to_names}
    mirror = Mirror(store_of(Settings()))
    state = StateCollector(mirror, PolicyRegistry(mirror), Keyring(mirror, None, may_be_open=True))
    found = []
    for collector in (*known, state):
        labels = getattr(collector, "_labelnames", None)
        found += [row(family, labels) for family in collector.collect()]
    return found


def row(family: Metric, labels: tuple[str, ...] | None) -> str:
    names = getattr(family, "_labelnames", ()) if labels is None else labels
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    of_info = tuple(label for sample in family.samples for label in sample.labels) if family.type == "info" else ()
    named = ", ".join(f"`{label}`" for label in (*names, *of_info))
    return f"| `{family.name}{suffix}` | {family.type} | {named} | {family.documentation} |"


def test_every_metric_is_on_the_page() -> None:
    table = [line for line in PAGE.splitlines() if line.startswith("| `winnow_")]
    assert sorted(table) == sorted(rows())


def test_alerts_and_recorded_series_are_on_the_page() -> None:
    files = [yaml.safe_load(path.read_text()) for path in (ROOT / "deploy/prometheus/rules").glob("*.yml")]
    rules = [rule for file in files for group in file["groups"] for rule in group["rules"]]
    assert set(re.findall(r"\| `(Winnow\w+)` \|", PAGE)) == {rule["alert"] for rule in rules if "alert" in rule}
    assert set(re.findall(r"`(winnow:[\w:]+)`", PAGE)) == {rule["record"] for rule in rules if "record" in rule}


def test_dashboards_and_values_of_labels_are_on_the_page() -> None:
    for path in (ROOT / "deploy/grafana/dashboards").glob("*.json"):
        assert f"**{json.loads(path.read_text())['title'].removeprefix('Winnow: ').capitalize()}**" in PAGE
    for outcome in Outcome:
        assert f"`{outcome}`" in PAGE
