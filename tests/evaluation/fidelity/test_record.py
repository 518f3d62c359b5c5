"""Records: rows of several runs in one, and the same rows read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from winnow_evaluation.fidelity.record import KEYS, FidelityRecord, merged

ASKED_KEYS = (
    "model phase policy parameters context prompts tokens kl top1 kv_read_ratio attended_ratio"
    " reported_share true_share share_error success"
).split()


def row(**told: Any) -> dict[str, Any]:
    basis: dict[str, Any] = dict.fromkeys(KEYS)
    basis |= {"model": "m", "text": "prose", "phase": "decode", "policy": "quest", "parameters": {"budget": 512}}
    return basis | {"context": 2048, "prompts": 2, "tokens": 8, "kl": 0.25, "top1": 0.5, "run": 0} | told


def record(device: str, *rows: dict[str, Any]) -> FidelityRecord:
    return FidelityRecord([{"device": device}], rows)


def test_a_row_has_the_keys_that_were_agreed() -> None:
    assert set(ASKED_KEYS) <= set(KEYS)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = record("cpu", row(), row(context=4096))
    written.write(tmp_path / "record.json")
    assert FidelityRecord.read(tmp_path / "record.json") == FidelityRecord(written.runs, list(written.rows))
    assert not list(tmp_path.glob("*.unfinished"))


def test_rows_of_several_runs_know_their_own(tmp_path: Path) -> None:
    both = merged([record("cpu", row()), record("gpu", row(context=4096), row(model="n"))])
    assert [(both.runs[row["run"]]["device"], row["model"], row["context"]) for row in both.rows] == [
        ("cpu", "m", 2048),
        ("gpu", "m", 4096),
        ("gpu", "n", 2048),
    ]
    both.write(tmp_path / "both.json")
    again = merged([FidelityRecord.read(tmp_path / "both.json"), record("other", row(phase="prefill"))])
    assert [run["device"] for run in again.runs] == ["cpu", "gpu", "other"]
    assert len(again.rows) == 4


def test_of_rows_of_the_same_the_last_counts() -> None:
    old = record("old", row(kl=1.0), row(policy="snapkv"))
    found = merged([old, record("new", row(kl=0.5))])
    assert [(row["policy"], row["kl"], found.runs[row["run"]]["device"]) for row in found.rows] == [
        ("quest", 0.5, "new"),
        ("snapkv", 0.25, "old"),
    ]
    # A run of which no row is left is gone.
    assert [run["device"] for run in merged([record("old", row()), record("new", row())]).runs] == ["new"]


@pytest.mark.parametrize("other", [{"parameters": {"budget": 256}}, {"preset": "fast"}, {"text": "code"}])
def test_what_tells_rows_apart(other: dict[str, Any]) -> None:
    assert len(merged([record("one", row()), record("two", row(**other))]).rows) == 2


@pytest.mark.parametrize(("content", "message"), [([], "no record"), ({"runs": [], "rows": [{"kl": 1}]}, "a row has")])
def test_something_else_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        FidelityRecord.read(path)
