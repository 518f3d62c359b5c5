"""``winnow bench``: it starts the benchmarks with what it is given."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.kernels import layer
from winnow_service.cli import bench
from winnow_service.cli.main import app


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    commands: list[list[str]] = []

    def note(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command[2:])
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", note)
    return commands


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("attention", "benchmarks.kernels.layer run"),
        ("attention --cases 32768x8", "benchmarks.kernels.layer run --cases 32768x8"),
        ("attention run --help", "benchmarks.kernels.layer run --help"),
        ("serve --model Qwen3-4B --policy tactic", "benchmarks.serving.serve run --model Qwen3-4B --policy tactic"),
        ("serve merge a.json b.json", "benchmarks.serving.serve merge a.json b.json"),
        ("serve --help", "benchmarks.serving.serve --help"),
        ("plots a.json", "benchmarks.speedup_plots a.json"),
    ],
)
def test_arguments_are_passed_on(given: str, expected: str, started: list[list[str]]) -> None:
    done = CliRunner().invoke(app, ["bench", *given.split()])
    assert started == [expected.split()]
    assert done.exit_code == 3


def test_outside_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[list[str]]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "_OWN_CHECKOUT", tmp_path)
    done = CliRunner().invoke(app, ["bench", "attention"])
    assert done.exit_code == 2
    assert "in a checkout of Winnow" in done.output
    assert started == []


def test_the_benchmarks_answer(capfd: pytest.CaptureFixture[str]) -> None:
    done = CliRunner().invoke(app, ["bench", "plots", "--help"])
    assert done.exit_code == 0
    assert "Draw the plots" in capfd.readouterr().out


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        layer.run(output=tmp_path / "attention.json")
    assert list(tmp_path.iterdir()) == []
