from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from tests.deployment.charts import VALUES_FILES, of_kind, render
from tests.deployment.dockerfiles import DOCKERFILES, stages
from tests.deployment.repository import ROOT, read_yaml, version
from winnow_service.metrics.instruments import Metrics

PAGE = (ROOT / "docs/deployment.md").read_text()
SERIES = r"(?:_bucket|_sum|_count)?"


def yaml_blocks() -> list[dict[str, Any]]:
    return [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)]


def test_metrics_of_the_service_exist() -> None:
    named = set(re.findall(rf"\b(winnow_[a-z_]+?){SERIES}\{{", PAGE))
    known = {family.name for family in Metrics().registry.collect()}
    assert named
    assert named <= known


def test_metrics_of_sglang_exist() -> None:
    package = find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    sources = Path(package.origin).parent.glob("srt/**/metrics*.py")
    folder = Path(package.origin).parent / "srt/observability"
    source = "".join(path.read_text() for path in {*sources, *folder.glob("*.py")})
    named = set(re.findall(rf"(sglang:[a-z_]+?){SERIES}\{{", PAGE))
    assert named
    for name in named:
        assert f'"{name}"' in source


def test_what_keda_scales_is_in_the_chart() -> None:
    [scaled] = [block for block in yaml_blocks() if block.get("kind") == "ScaledObject"]
    # The page names its release "winnow"; the tests name theirs "demo".
    name = scaled["spec"]["scaleTargetRef"]["name"].replace("winnow", "demo-winnow")
    assert name in of_kind("gateway.yaml", "Deployment")


def test_the_least_values_are_enough() -> None:
    [values] = [block for block in yaml_blocks() if "auth" in block]
    assert render(values)["runtime.yaml"].strip()


def test_commands_name_what_there_is() -> None:
    for path in re.findall(r"docker/\w+\.Dockerfile|compose(?:\.gpu)?\.yaml|helm/winnow/ci|deploy/\w+", PAGE):
        assert (ROOT / path).exists()
    for tag in re.findall(r"--tag \S+:(\d+\.\d+\.\d+)", PAGE):
        assert tag == version()
    for base in {each.base for dockerfile in DOCKERFILES for each in stages(dockerfile)} - {"${VARIANT}"}:
        assert f"`{base}`" in PAGE
    assert VALUES_FILES


def test_variables_are_those_of_compose() -> None:
    used = set(re.findall(r"\$\{([A-Z_]+)", (ROOT / "compose.yaml").read_text()))
    passed_on = {
        name
        for service in read_yaml("compose.yaml")["services"].values()
        for name, value in service.get("environment", {}).items()
        if value is None
    }
    [table] = re.findall(r"\| variable, in the shell.*?\n\n", PAGE, re.S)
    assert set(re.findall(r"`([A-Z][A-Z_]+)`", table)) == used | passed_on
