"""The chart, rendered as ``helm template`` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

from tests.deployment.repository import ROOT

CHART = ROOT / "helm/winnow"
VALUES_FILES = tuple(sorted(path.name for path in (CHART / "ci").glob("*.yaml")))
RELEASE = "demo"

Manifest = dict[str, Any]


def values_of(name: str) -> dict[str, Any]:
    """One of the values files of the chart's tests."""
    values: dict[str, Any] = yaml.safe_load((CHART / "ci" / name).read_text())
    return values


def render(values: Mapping[str, Any]) -> dict[str, str]:
    """Return each template's output.

    Raises:
        HelmError: the chart refuses the values.
    """
    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(dict(values), name=RELEASE, namespace="prod")
    return {Path(path).name: text for path, text in rendered.items()}


@cache
def manifests(values_file: str) -> tuple[Manifest, ...]:
    """What is installed with one of the values files."""
    rendered = render(values_of(values_file))
    documents = [yaml.safe_load_all(text) for name, text in rendered.items() if name != "NOTES.txt"]
    return tuple(document for each in documents for document in each if document)


def of_kind(values_file: str, kind: str) -> dict[str, Manifest]:
    """The resources of a kind, by name."""
    return {each["metadata"]["name"]: each for each in manifests(values_file) if each["kind"] == kind}


def pods(values_file: str) -> Iterator[tuple[str, Manifest]]:
    """The templates of all pods, with names that tell them apart."""
    for manifest in manifests(values_file):
        name = manifest["metadata"]["name"]
        if manifest["kind"] in {"Deployment", "StatefulSet"}:
            yield name, manifest["spec"]["template"]
        elif manifest["kind"] == "LeaderWorkerSet":
            group = manifest["spec"]["leaderWorkerTemplate"]
            yield name, group["leaderTemplate"]
            yield f"{name}-worker", group["workerTemplate"]


def containers(values_file: str) -> Iterator[tuple[str, Manifest]]:
    """The containers of all pods, with their pods' names."""
    for name, pod in pods(values_file):
        for container in pod["spec"]["containers"]:
            yield name, container


def matches(selector: Mapping[str, str], pod: Manifest) -> bool:
    """Whether a selector of labels selects a pod."""
    labels: dict[str, str] = pod["metadata"]["labels"]
    return selector.items() <= labels.items()
