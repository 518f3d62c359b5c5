"""Each image's Python environment: built as its Dockerfile says, and its entry point started."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.deployment.dockerfiles import build_environment, stage
from tests.deployment.repository import ROOT
from tests.deployment.test_images import HEALTHCHECK
from tests.ports import free_port

SERVICE = "docker/service.Dockerfile"
RUNTIME = "docker/runtime.Dockerfile"
OURS = "sglang-winnow"
UV = Path(sys.executable).parent / "uv"
# What SGLang runs, and every Debian and Ubuntu has.
SYSTEM_PROGRAMS = ("lscpu",)
ADMIN_KEY = "0123456789abcdef" * 2


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def installed(environment: Path) -> dict[str, str]:
    [packages] = environment.glob("lib/python*/site-packages")
    return {canonicalize_name(each.name): each.version for each in distributions(path=[str(packages)])}


def size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


@contextmanager
def started(
    dockerfile: str, environment: Path, arguments: list[str], variables: dict[str, str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """The image's entry point with ``arguments``, as alone in the world as it is in the image."""
    final = stage(dockerfile, "")
    [entry_point] = final.values("ENTRYPOINT")
    own = {name: value for name, value in final.environment.items() if name != "PATH"}
    # The bases without CUDA have no compiler.
    system = folder / "bin"
    system.mkdir()
    for name in SYSTEM_PROGRAMS:
        (system / name).symlink_to(shutil.which(name) or name)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [environment / "bin" / json.loads(entry_point)[0], *json.loads(entry_point)[1:], *arguments],
            env={"PATH": f"{environment / 'bin'}:{system}", "HOME": str(folder)} | own | variables,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_healthy(
    dockerfile: str, environment: Path, port: int, process: subprocess.Popen[bytes], log: Path, timeout_seconds: float
) -> None:
    """Ask as the image's health check does."""
    [check] = stage(dockerfile, "").values("HEALTHCHECK")
    [path] = re.findall(r'http://127\.0\.0\.1:\d+(/[a-z]+)"', check)
    command = [str(environment / "bin/python"), str(HEALTHCHECK), f"http://127.0.0.1:{port}{path}"]
    deadline = time.monotonic() + timeout_seconds
    while subprocess.run(command, capture_output=True, timeout=30, check=False).returncode != 0:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def service_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_environment(SERVICE, tmp_path_factory.mktemp("service"))


def test_the_service_has_pinned_versions_only(service_environment: Path) -> None:
    versions = installed(service_environment)
    assert versions.pop(OURS)
    assert "fastapi" in versions
    assert versions.items() <= pins().items()


def test_the_service_has_nothing_of_the_runtime(service_environment: Path) -> None:
    assert not installed(service_environment).keys() & {"torch", "sglang", "triton", "numpy"}


def test_the_service_is_small(service_environment: Path) -> None:
    assert 10e6 < size(service_environment) < 100e6


def test_the_service_helps(service_environment: Path) -> None:
    helped = subprocess.run(
        [service_environment / "bin/winnow", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert helped.returncode == 0
    assert "serve" in helped.stdout


def test_the_service_starts(service_environment: Path, tmp_path: Path) -> None:
    [command] = stage(SERVICE, "").values("CMD")
    port = free_port()
    variables = {"WINNOW_STORE_URL": f"sqlite:///{tmp_path}/control.db", "WINNOW_ADMIN_KEY": ADMIN_KEY}
    arguments = [*json.loads(command), "--port", str(port)]
    with started(SERVICE, service_environment, arguments, variables, tmp_path) as process:
        wait_until_healthy(SERVICE, service_environment, port, process, tmp_path / "log", timeout_seconds=30)
    assert ADMIN_KEY not in (tmp_path / "log").read_text()


@pytest.fixture(scope="module")
def runtime_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # In the image each file is copied and compiled; here gigabytes are only linked.
    overrides = {"UV_LINK_MODE": "hardlink", "UV_COMPILE_BYTECODE": "0"}
    environment = build_environment(RUNTIME, tmp_path_factory.mktemp("runtime"), overrides)
    yield environment
    shutil.rmtree(environment)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_runtime_has_pinned_versions_only(runtime_environment: Path) -> None:
    versions = installed(runtime_environment)
    assert versions.pop(OURS)
    assert versions["sglang"] == pins()["sglang"]
    assert versions.items() <= pins().items()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_runtime_starts(runtime_environment: Path, tmp_path: Path) -> None:
    port = free_port()
    arguments = ["--port", str(port), "--model-path", str(ROOT / "models/needle"), "--served-model-name", "needle"]
    variables = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(os.cpu_count())}
    with started(RUNTIME, runtime_environment, arguments, variables, tmp_path) as process:
        wait_until_healthy(RUNTIME, runtime_environment, port, process, tmp_path / "log", timeout_seconds=600)


@pytest.mark.full
def test_the_pins_hold_for_the_python_of_the_cuda_image() -> None:
    # Ubuntu 24.04's Python is 3.12, with glibc 2.39.
    resolved = subprocess.run(
        [
            UV,
            *("pip", "compile", "pyproject.toml", "--extra", "runtime", "--constraint", "constraints.txt"),
            *("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_39", "--only-binary", ":all:"),
            *("--no-header", "--no-annotate", "--quiet"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert resolved.returncode == 0, resolved.stderr
    versions = dict(line.split("==") for line in resolved.stdout.splitlines())
    assert versions["sglang"] == pins()["sglang"]
    assert versions.items() <= pins().items()
