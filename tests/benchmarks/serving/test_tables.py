"""The documentation's tables of servers."""

from __future__ import annotations

from pathlib import Path

from benchmarks.records import Record, Row
from benchmarks.serving.tables import verified_table


def row(policy: str, figure: str, **parameters: object) -> Row:
    return Row(
        bench="serve",
        model="Llama-3.1-8B",
        policy=policy,
        parameters={"figure": figure, "backend": "winnow", "attention": None, "kv_read_ratio": 0.25, **parameters},
        context=32768,
        batch=8,
        dense=12.0,
        measured=8.0,
        unit="ms",
        speedup=1.5,
        floor_ratio=None,
        spread=None,
    )


def test_verified_answers_have_their_mean_time_a_token(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    asked = {"decode": {"policy": "snapkv"}, "verify": {"draft_tokens": 4}}
    rows = [row("dense", "mean tpot"), row("a", "tpot", attention=asked), row("a", "mean tpot", attention=asked)]
    Record({"device": "H200", "commit": {"id": "abc", "modified": False}}, rows).write(path)
    lines = verified_table(path).splitlines()
    assert [line.split(" | ")[1:4] for line in lines[2:4]] == [["dense, winnow", "", "8.00"], ["a", "4", "8.00"]]
    assert sum(line.startswith("| 32K") for line in lines) == 2
