"""The table of what audits cost on a CPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks.cpu.audits import WAYS, Audited, audits_table
from winnow_evaluation.writing import write_json


def test_shares_are_beside_requests_that_did_not_ask(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    found = [
        Audited(8192, None, False, [0.02, 0.02]),
        Audited(8192, 0.01, False, [0.020, 0.022]),
        Audited(8192, 0.1, True, [0.03, 0.03]),
    ]
    record = {"model": "needle", "tokens": 202, "cpu": "EPYC", "cpu_threads": 2}
    commit = {"id": "a" * 40, "modified": False}
    write_json(path, record | {"commit": commit, "audited": [asdict(audited) for audited in found]})
    lines = [line.strip("| ").split(" | ") for line in audits_table(path).splitlines() if line.startswith("| 8,192")]
    assert lines == [
        ["8,192", "not asked", "20.0", "20.0 to 20.0", "+0.0"],
        ["8,192", "0.01", "21.0", "20.0 to 22.0", "+5.0"],
        ["8,192", "0.1 with KL", "30.0", "30.0 to 30.0", "+50.0"],
    ]


def test_what_is_asked_is_what_the_label_says() -> None:
    every = [Audited(1, share, kl, []) for share, kl in WAYS]
    assert {audited.label: audited.policy.get("audit") for audited in every} == {
        "not asked": None,
        "0": 0.0,
        "0.01": 0.01,
        "0.1": 0.1,
        "0.01 with KL": {"share": 0.01, "kl": True},
        "0.1 with KL": {"share": 0.1, "kl": True},
    }
