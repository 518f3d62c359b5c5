"""The wheel, installed beside an SGLang that is there already, in an environment that has nothing of this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.deployment import Deployment, start, stop, wait_ready
from tests.models import ModelShape, write_model, write_weights
from tests.ports import free_port
from tests.runtime import runtime_server

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
TOO_OLD = "0.5.15"
# Policies act at the lengths of tests. Nothing is found through the shell's PYTHONPATH.
ENVIRONMENT = {"WINNOW_CROSSOVER_TOKENS": "0", "PYTHONPATH": ""}
QUESTION = {
    "model": "model",
    "messages": [{"role": "user", "content": "the quiet harbor " * 40}],
    "max_tokens": 4,
    "attention": {"decode": {"policy": "streaming_llm", "sinks": 4, "window": 64}},
}


@dataclass(frozen=True)
class Installed:
    """An environment with SGLang in which the wheel was installed; ``before`` and ``after`` are its packages."""

    folder: Path
    before: frozenset[str]
    after: frozenset[str]
    model: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def winnow(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``winnow`` outside the checkout."""
        return subprocess.run(
            [self.folder / "bin" / "winnow", *arguments],
            cwd=self.folder,
            env=os.environ | ENVIRONMENT | {"COLUMNS": "250"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )


def uv(*arguments: str | Path) -> str:
    done = subprocess.run([UV, "--quiet", *arguments], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def packages(python: str) -> frozenset[str]:
    return frozenset(uv("pip", "freeze", "--python", python).splitlines())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("wheel")
    environment = folder / "environment"
    python = str(environment / "bin" / "python")
    # The versions that the tests run with, so that nothing is fetched that is not here.
    here = folder / "constraints.txt"
    here.write_text("\n".join(sorted(line for line in packages(sys.executable) if "==" in line)))
    model = write_model(folder / "model", ModelShape())
    write_weights(model)
    try:
        uv("build", "--wheel", "--out-dir", folder, ROOT)
        [wheel] = folder.glob("*.whl")
        uv("venv", "--python", sys.executable, environment)
        uv("pip", "install", "--python", python, "--constraint", here, f"sglang=={version('sglang')}")
        before = packages(python)
        uv("pip", "install", "--python", python, "--constraint", here, wheel)
        yield Installed(environment, before, packages(python), model)
    finally:
        # Gigabytes, which pytest would keep for its next three runs.
        shutil.rmtree(environment, ignore_errors=True)


def test_installing_the_wheel_changes_no_other_package(installed: Installed) -> None:
    assert installed.before < installed.after
    assert any(package.startswith("sglang-winnow") for package in installed.after - installed.before)


def test_doctor_accepts_the_environment(installed: Installed) -> None:
    done = installed.winnow("doctor")
    assert done.returncode == 0, done.stdout
    assert "in force" in done.stdout


def test_sglang_finds_the_plugin_by_itself(installed: Installed, tmp_path: Path) -> None:
    arguments = ("--served-model-name", "model", "--attention-backend", "winnow", "--max-total-tokens", "4096")
    log = tmp_path / "log"
    with runtime_server(installed.model, *arguments, log=log, python=installed.python, **ENVIRONMENT) as runtime:
        answer = httpx.post(f"{runtime.url}/v1/chat/completions", json=asked_of_sglang(), timeout=120)
    assert answer.status_code == 200, answer.text
    assert 0 < answer.json()["attention"]["decode"]["attended_ratio"] < 1


def asked_of_sglang() -> dict[str, object]:
    policy = '{"decode": {"policy": "streaming_llm", "sinks": 4, "window": 64}}'
    return {name: value for name, value in QUESTION.items() if name != "attention"} | {
        "custom_params": {"attention": policy}
    }


def test_winnow_up_serves_a_model(installed: Installed, tmp_path: Path) -> None:
    port, runtime_port = free_port(), free_port()
    command = [str(installed.folder / "bin" / "winnow"), "up", "--model", str(installed.model), "--device", "cpu"]
    command += ["--port", str(port), "--runtime-port", str(runtime_port)]
    process = start(command, tmp_path / "log", ENVIRONMENT)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_ready(Deployment(address, f"http://127.0.0.1:{runtime_port}", process, tmp_path / "log"))
        answer = httpx.post(f"{address}/v1/chat/completions", json=QUESTION, timeout=120)
    finally:
        status = stop(process)
    assert status == 0
    assert answer.status_code == 200, answer.text
    assert 0 < answer.json()["attention"]["decode"]["attended_ratio"] < 1


def test_winnow_up_says_that_a_wheel_brings_no_model(installed: Installed) -> None:
    done = installed.winnow("up", "--device", "cpu", "--port", str(free_port()), "--runtime-port", str(free_port()))
    assert done.returncode == 2
    assert "needle is in checkouts of Winnow only; there is smollm2 for others (--model smollm2)" in done.stderr


@pytest.mark.parametrize("command", ["attention", "serve", "plots"])
def test_winnow_bench_says_where_the_benchmarks_are(installed: Installed, command: str) -> None:
    done = installed.winnow("bench", command)
    assert done.returncode == 2
    assert "run this in a checkout of Winnow" in " ".join(done.stderr.replace("│", " ").split())


def test_an_sglang_before_the_window_is_refused(installed: Installed) -> None:
    uv("pip", "install", "--python", installed.python, "--no-deps", f"sglang=={TOO_OLD}")
    done = installed.winnow("doctor")
    assert done.returncode == 1
    assert f"sglang: {TOO_OLD} is outside" in done.stdout
