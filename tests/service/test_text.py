"""``winnow text``: what it prints, and how it fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.evaluation.text.made_up_packages import debian_package, offer, pages
from winnow_evaluation.text import load_text
from winnow_evaluation.text.packages import Package
from winnow_service.cli import text
from winnow_service.cli.main import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["text", *arguments], catch_exceptions=False)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    made = debian_package(tmp_path, pages(3))
    offer(tmp_path, monkeypatch)
    monkeypatch.setenv("WINNOW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(text, "listed_packages", lambda: (made,))
    return made


def test_text_is_listed_collected_and_counted(package: Package, tmp_path: Path) -> None:
    before = run()
    assert before.exit_code == 0
    row = [cell.strip() for cell in before.stdout.split("\n")[3].strip("| ").split("|")]
    assert row == ["made-up", "1.0", "debian", "prose", "MIT", "no"]
    assert f"no text in {tmp_path / 'cache' / 'text'}: run 'winnow text collect' first" in before.stdout

    collected = run("collect")
    assert collected.exit_code == 0, collected.output
    assert "of 32K tokens and more" in collected.stdout
    after = run()
    assert "| yes" in after.stdout
    assert sum(len(load_text(split, "prose")) for split in ("train", "validation", "test")) == 1


def test_what_cannot_be_fetched_is_one_line(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "listed_packages", lambda: (replace(package, version="2.0"),))
    failed = run("collect")
    assert failed.exit_code == 1
    assert failed.stderr.startswith("Error: made-up 2.0 cannot be fetched (apt-get: E: Version for 'made-up=2.0'")
    assert failed.stderr.count("\n") == 1
