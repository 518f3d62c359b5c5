"""How the documentation tells what layers take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.kernels.tables import coded_table, kernels_table
from benchmarks.records import Record, Row


def row(stage: str, measured: float, **parameters: Any) -> Row:
    more = {"read_percent": 3.02, "counted_again_percent": 0.5, "union_percent": 3, "p": 0.81, "termination": "none"}
    return Row(
        bench="attention",
        model="Llama-3.1-8B",
        policy="lowbit_top_p",
        parameters={"stage": stage, **more, **parameters},
        context=32768,
        batch=8,
        dense=270.0,
        measured=measured,
        unit="µs",
        speedup=270.0 / measured if stage == "layer" else None,
        floor_ratio=0.5 if stage == "layer" else None,
    )


def test_a_layers_parts_stand_in_one_line(tmp_path: Path) -> None:
    others = row("layer", 10.0)
    del others.parameters["counted_again_percent"]
    ended = {"termination": "never settled"}
    rows = [
        others,
        *(row(stage, measured) for stage, measured in (("select", 40.0), ("attend", 20.0), ("layer", 60.0))),
        row("build", 1090.0),
        row("kernel score_kernel", 30.0),
        row("layer", 72.0, **ended),
    ]
    header = {"device": "a GPU", "commit": None}
    path = tmp_path / "record.json"
    Record(header, rows).write(path)
    lines = coded_table(path).splitlines()
    assert lines[2] == "| 32K × 8 | `lowbit_top_p`, union of 3 % | 3.0 | 270 | 40 | 20 | 60 | 4.50 | 50 | 0.5 | 1090 |"
    assert lines[3].startswith("| 32K × 8 | `lowbit_top_p`, union of 3 %, never settled | 3.0 | 270 |  |  | 72 |")
    assert kernels_table(path).splitlines()[2:3] == ["| 32K × 8 | `lowbit_top_p`, union of 3 % | score_kernel | 30.0 |"]


def test_policies_with_a_share_or_a_budget_say_so(tmp_path: Path) -> None:
    rows = [row("layer", 60.0), row("layer", 50.0, budget=1024)]
    for each in rows:
        del each.parameters["union_percent"]
    del rows[1].parameters["p"]
    path = tmp_path / "record.json"
    Record({"device": "a GPU", "commit": None}, rows).write(path)
    lines = coded_table(path).splitlines()
    assert [line.split(" | ")[1] for line in lines[2:4]] == ["`lowbit_top_p`, p 0.81", "`lowbit_top_p`, budget 1,024"]
