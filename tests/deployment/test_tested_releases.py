"""The releases of SGLang that Winnow says it runs on are those that it was tested on."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from sglang_winnow.sglang_versions.releases import NEWEST, OLDEST
from tests.deployment.repository import ROOT
from tests.tested_releases import PAGE, RECORD, read, table


def test_the_page_has_the_record() -> None:
    assert table(read()) in PAGE.read_text()


def test_every_release_from_the_oldest_to_the_newest_was_tested() -> None:
    releases = [Version(release) for release in read()]
    assert releases == sorted(releases)
    assert (releases[0], releases[-1]) == (OLDEST, NEWEST)
    assert [release.micro for release in releases] == list(range(OLDEST.micro, NEWEST.micro + 1))
    assert all("start" in of for of in read().values())


@pytest.mark.parametrize("release", [OLDEST, NEWEST], ids=["oldest", "newest"])
@pytest.mark.parametrize("kind", ["cpu", "interpreted"])
def test_the_oldest_and_the_newest_passed_all_that_needs_no_gpu(release: Version, kind: str) -> None:
    assert read()[str(release)][kind]["tests"] > 100


def test_nothing_is_noted_of_a_gpu_where_there_is_none() -> None:
    before = RECORD.read_bytes()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--tested=cuda",
        f"{Path(__file__)}::{test_the_page_has_the_record.__name__}",
    ]
    without = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=without, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--tested=cuda: there is no GPU" in result.stderr
    assert RECORD.read_bytes() == before


def test_the_runtime_that_is_installed_is_one_of_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [sglang] = [Requirement(line) for line in project["optional-dependencies"]["runtime"]]
    assert all(sglang.specifier.contains(release) for release in read())
    assert not any(sglang.specifier.contains(f"0.5.{micro}") for micro in (OLDEST.micro - 1, NEWEST.micro + 1))
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"sglang=={OLDEST}" in pinned
    assert f"sglang=={NEWEST}" in (ROOT / f"constraints-{NEWEST}.txt").read_text().splitlines()
    assert f"NEWEST_SGLANG := {NEWEST}\n" in (ROOT / "Makefile").read_text()
