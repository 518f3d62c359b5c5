"""The plots of the GPU benchmarks: which rows they show, and that they are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import Record, Row
from benchmarks.speedup_plots import draw, groups_of, is_shown, label_of
from tests.plots import assert_readable


def row(policy: str, speedup: float, context: int = 32768, bench: str = "attention", **parameters: Any) -> Row:
    reported = {"backend": "winnow", "stage": "layer", "termination": "none", "figure": "tpot"} | parameters
    return Row(
        bench=bench,
        model="Llama-3.1-8B",
        policy=policy,
        parameters=reported,
        context=context,
        batch=8,
        dense=100.0,
        measured=100 / speedup,
        unit="µs",
        speedup=speedup,
        floor_ratio=0.5,
    )


ROWS = [
    row("quest", 4.25),
    row("quest", 6.0, 131072),
    row("tactic", 8.0, union_percent=3),
    row("tactic", 5.0, union_percent=12),
]
HIDDEN = [
    row("dense", 1.0),
    row("tactic", 7.0, union_percent=3, termination="never settled"),
    row("delta", 0.9, role="refresh"),
    row("dense", 1.0, backend="fa3"),
    row("delta", 2.0, bench="serve", figure="ttft"),
]


def test_only_what_compares_policies_is_shown() -> None:
    assert [is_shown(each) for each in ROWS] == [True] * len(ROWS)
    assert [is_shown(each) for each in HIDDEN] == [False] * len(HIDDEN)
    assert is_shown(row("delta", 2.0, bench="serve"))


def test_groups() -> None:
    groups, cases, speedups = groups_of(ROWS)
    assert groups == ["quest", "tactic, 3 %", "tactic, 12 %"]
    assert cases == [(32768, 8), (131072, 8)]
    assert speedups["quest", (131072, 8)] == 6.0
    assert label_of(ROWS[0]) == "quest"
    with pytest.raises(ValueError, match="quest was measured twice"):
        groups_of([ROWS[0], ROWS[0]])


def test_a_plot(tmp_path: Path) -> None:
    served = [row("delta", 2.5, bench="serve"), row("half delta, half dense", 1.4, bench="serve")]
    record = Record({"device": "H200"}, [*ROWS, *HIDDEN, *served])
    paths = draw(record, tmp_path)
    assert [path.name for path in paths] == ["gpu-attention-llama-3.1-8b.svg", "gpu-serve-llama-3.1-8b.svg"]
    text = paths[0].read_text()
    for shown in ("tactic, 12 %", "32K × 8", "128K × 8", "H200", ">4.2<", ">8.0<"):
        assert shown in text
    assert "half delta" not in text
    for path in paths:
        assert_readable(path)
    again = draw(record, tmp_path / "again")
    assert again[0].read_bytes() == paths[0].read_bytes()


def test_more_cases_make_more_lines_of_panels(tmp_path: Path) -> None:
    rows = [row("quest", 1.5 + number, 1024 << number) for number in range(7)]
    [path] = draw(Record({"device": "H200"}, rows), tmp_path)
    assert_readable(path)
    text = path.read_text()
    assert all(f"{1 << number}K × 8" in text for number in range(7))
    assert text.count(">quest<") == 2


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row"):
        draw(Record({"device": "H200"}, HIDDEN), tmp_path)
