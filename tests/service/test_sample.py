"""``winnow sample`` and the example that it made."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from winnow_service.cli.main import app

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "buried-answer-16k.json"
OPTIONS = ["sample", "niah_single_2", "--words", "13900", "--seed", "16"]


def test_the_example_is_what_the_command_prints() -> None:
    printed = CliRunner().invoke(app, OPTIONS)
    assert printed.exit_code == 0
    assert printed.stdout == EXAMPLE.read_text()


def test_the_answer_is_in_the_text_once() -> None:
    answer = CliRunner().invoke(app, [*OPTIONS, "--answer"]).stdout.strip()
    [message] = json.loads(EXAMPLE.read_text())["messages"]
    assert message["content"].count(answer) == 1


def test_an_unknown_task_is_refused_by_name() -> None:
    refused = CliRunner().invoke(app, ["sample", "haystack"])
    assert refused.exit_code == 2
    assert "haystack" in refused.output
