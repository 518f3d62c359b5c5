from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployment.prometheus import RULES

TESTS = Path(__file__).parent / "rules"


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def rules() -> list[dict[str, Any]]:
    files = [yaml.safe_load(path.read_text()) for path in RULES.glob("*.yml")]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def test_rules_are_valid() -> None:
    promtool("check", "rules", *RULES.glob("*.yml"))


@pytest.mark.parametrize("path", sorted(TESTS.glob("*.yml")), ids=lambda path: path.stem)
def test_rules_hold_what_their_tests_say(path: Path) -> None:
    promtool("test", "rules", path)


def test_every_alert_is_seen_to_fire_and_not_to() -> None:
    files = [yaml.safe_load(path.read_text()) for path in TESTS.glob("*.yml")]
    cases = [case for file in files for test in file["tests"] for case in test["alert_rule_test"]]
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == alerts
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == alerts


def test_every_alert_says_how_bad_it_is_and_what_it_means() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"warning", "critical"}
            assert rule["annotations"].keys() == {"summary", "description"}
