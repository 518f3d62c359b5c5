"""Tiny packages of both registries, made on the spot, and programs that fetch them without a network."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from winnow_evaluation.text.packages import Form, Package

NAME, VERSION = "made-up", "1.0"


def debian_package(folder: Path, files: Mapping[str, bytes], form: Form = "html", name: str = NAME) -> Package:
    """Build ``name_1.0_all.deb`` with these files by path, and describe it."""
    tree = folder / f"tree-{name}"
    for path, content in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(content)
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN" / "control").write_text(
        f"Package: {name}\nVersion: {VERSION}\nArchitecture: all\nMaintainer: nobody <n@example.org>\nDescription: x\n"
    )
    file = folder / f"{name}_{VERSION}_all.deb"
    subprocess.run(["dpkg-deb", "--build", str(tree), str(file)], check=True, capture_output=True)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return Package("debian", name, VERSION, "MIT", digest, "prose", form, ("usr/*",))


def wheel(folder: Path, files: Mapping[str, bytes]) -> Package:
    """Build ``made_up-1.0-py3-none-any.whl`` with these files by path, and describe it."""
    file = folder / f"made_up-{VERSION}-py3-none-any.whl"
    about = f"made_up-{VERSION}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return Package("pypi", NAME, VERSION, "MIT", digest, "code", "source", ("*.py",))


def offer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let apt-get and pip fetch what lies in ``folder``, and nothing else."""
    programs = folder / "bin"
    programs.mkdir()
    apt_get = programs / "apt-get"
    apt_get.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {folder}/apt-get.log\n'
        "for last; do :; done\n"
        f'file={folder}/$(echo "$last" | tr = _)_all.deb\n'
        '[ -f "$file" ] || { echo "W: offline" >&2; echo "E: Version for \'$last\' was not found" >&2; exit 100; }\n'
        'cp "$file" .\n'
    )
    apt_get.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def pages(count: int) -> dict[str, bytes]:
    """Pages of prose, each long enough to be kept by itself."""
    return {
        f"usr/share/doc/{number}.html": "".join(
            f"<p>Page {number} tells in its sentence number {line} what nobody else has told.</p>" for line in range(60)
        ).encode()
        for number in range(1, count + 1)
    }
