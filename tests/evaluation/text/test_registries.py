from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from tests.evaluation.text.made_up_packages import debian_package, offer, wheel
from winnow_evaluation.text import TextError
from winnow_evaluation.text.packages import Package
from winnow_evaluation.text.registries import fetch, files_of

FILES = {"usr/share/a.txt": b"one", "usr/share/deep/b.txt": b"two", "etc/c.txt": b"not read"}


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def package_of(registry: str, folder: Path) -> Package:
    files = FILES if registry == "debian" else {f"{path}.py": content for path, content in FILES.items()}
    package = debian_package(folder, files) if registry == "debian" else wheel(folder, files)
    return replace(package, include=("usr/*",))


@pytest.mark.parametrize("registry", ["debian", "pypi"])
def test_a_package_is_fetched_by_its_registrys_program_and_read(
    registry: str, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = package_of(registry, tmp_path)
    offer(tmp_path, monkeypatch)
    file = fetch(package, scratch)
    assert list(scratch.iterdir()) == [file]
    found = {path.removesuffix(".py"): content for path, content in files_of(package, file)}
    assert found == {"usr/share/a.txt": b"one", "usr/share/deep/b.txt": b"two"}
    without = replace(package, exclude=("*/deep/*",))
    assert len(list(files_of(without, file))) == 1


@pytest.mark.parametrize("registry", ["debian", "pypi"])
def test_another_file_than_the_listed_one_is_refused(
    registry: str, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = replace(package_of(registry, tmp_path), sha256="0" * 64)
    offer(tmp_path, monkeypatch)
    with pytest.raises(TextError, match=r"^made-up 1\.0.*(SHA-256|HASHES|hashes)"):
        fetch(package, scratch)


@pytest.mark.parametrize(
    ("registry", "reason"), [("debian", "E: Version for 'made-up=2.0' was not found"), ("pypi", "ERROR: ")]
)
def test_a_package_that_is_not_offered_is_one_sentence(
    registry: str, reason: str, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = replace(package_of(registry, tmp_path), version="2.0")
    offer(tmp_path, monkeypatch)
    with pytest.raises(TextError) as caught:
        fetch(package, scratch)
    message = str(caught.value)
    assert message.startswith("made-up 2.0 cannot be fetched (")
    assert reason in message
    assert "\n" not in message


def test_missing_programs_are_named(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    debian, pypi = debian_package(tmp_path, FILES), wheel(tmp_path, {})
    offer(tmp_path, monkeypatch)
    file = fetch(debian, scratch)
    monkeypatch.setenv("PATH", str(scratch))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TextError, match="apt-get is not here"):
        fetch(debian, scratch)
    with pytest.raises(TextError, match="dpkg-deb is not here"):
        list(files_of(debian, file))
    with pytest.raises(TextError, match="neither pip nor uv is here"):
        fetch(pypi, scratch)


def test_where_pip_is_not_uv_runs_it(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = wheel(tmp_path, {"made_up.py": b""})
    offer(tmp_path, monkeypatch)
    uvx = tmp_path / "bin" / "uvx"
    uvx.write_text(f'#!/bin/sh\necho "$1 $2" > {tmp_path}/asked\ncp {tmp_path}/*.whl .\n')
    uvx.chmod(0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert fetch(package, scratch).suffix == ".whl"
    assert (tmp_path / "asked").read_text() == "pip download\n"


@pytest.mark.parametrize("registry", ["debian", "pypi"])
def test_a_file_that_is_no_package_is_refused(registry: str, tmp_path: Path) -> None:
    package = package_of(registry, tmp_path)
    file = tmp_path / "broken"
    file.write_bytes(b"neither an archive of ar nor of zip")
    with pytest.raises(TextError, match=r"^made-up 1\.0: broken cannot be unpacked"):
        list(files_of(package, file))
