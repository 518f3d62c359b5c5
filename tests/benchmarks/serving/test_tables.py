"""The documentation's tables of servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.records import Record, Row
from benchmarks.serving.chosen_answers import ALWAYS, Chosen
from benchmarks.serving.tables import audit_table, chosen_table, verified_answers_table, verified_table
from benchmarks.serving.verified_answers import Answered, largest_lead, row_of


def row(policy: str, figure: str, measured: float, **parameters: object) -> Row:
    return Row(
        bench="serve",
        model="Llama-3.1-8B",
        policy=policy,
        parameters={"figure": figure, "backend": "winnow", "attention": None, "kv_read_ratio": 0.25, **parameters},
        context=32768,
        batch=8,
        dense=None,
        measured=measured,
        unit="ms",
        speedup=None,
        floor_ratio=None,
        spread=None,
    )


def test_verified_answers_have_their_mean_time_a_token(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    asked = {"decode": {"policy": "snapkv"}, "verify": {"draft_tokens": 4}}
    rows = [
        row("dense", "mean tpot", 12.0),
        row("dense", "mean tpot", 11.0, backend="flashinfer"),
        row("a", "tpot", 7.0, attention=asked),
        row("a", "mean tpot", 8.0, attention=asked),
        row("a", "p99 between tokens", 40.0, attention=asked),
        row("dense", "mean tpot", 16.0, run=1),
        row("dense beside half a", "mean tpot", 10.0, run=1, attention=asked),
    ]
    header = {"device": "H200", "commit": {"id": "abc", "modified": False}}
    header |= {"winnow_environment": {"SGLANG_SIMULATE_ACC_LEN": "4.1"}}
    Record({"runs": [header, header]}, rows).write(path)
    lines = [line.strip("| ").split(" | ") for line in verified_table(path).splitlines() if line.startswith("| 32K")]
    assert [line[1:7] for line in lines] == [
        ["dense, winnow", "", "", "12.00", "0.92", ""],
        ["dense, flashinfer", "", "", "11.00", "1.00", ""],
        ["a", "4", "4.1", "8.00", "1.38", "40"],
        ["dense, winnow", "", "", "16.00", "1.00", ""],
        ["dense beside half a", "4", "4.1", "10.00", "1.60", ""],
    ]


def test_audited_answers_are_beside_those_that_are_not(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    rows = [
        row("dense", "mean tpot", 12.0),
        *(row("a", figure, measured) for figure, measured in (("mean tpot", 8.0), ("p99 between tokens", 9.0))),
        *(row("a, audited", figure, measured) for figure, measured in (("mean tpot", 8.4), ("p99 between tokens", 11))),
    ]
    Record({"device": "H200", "commit": {"id": "abc", "modified": False}}, rows).write(path)
    lines = [line.strip("| ").split(" | ") for line in audit_table(path).splitlines() if line.startswith("| 32K")]
    assert [line[1:] for line in lines] == [["a", "8.00", "+0.0", "9.00"], ["a, audited", "8.40", "+5.0", "11.00"]]


def test_answers_of_a_real_model_are_beside_dense_ones(tmp_path: Path) -> None:
    def cost(**verify: int) -> dict[str, Any]:
        return {"decode": {"kv_read_ratio": 0.25}} | ({"verify": verify} if verify else {})

    dense = Answered(4.0, [[1, 2, 3], [4, 5, 6]], [cost(), cost()])
    checked = cost(verifications=2, accepted=6)
    verified = Answered(2.0, [[1, 2, 3], [4, 7, 6]], [checked, checked])
    path = tmp_path / "record.json"
    header = {"device": "H200", "commit": {"id": "abc", "modified": False}, "texts": ["prose"], "tokens": 3}
    asked = (("dense", dense, None), ("a", verified, 0.125))
    rows = [row_of(name, own, dense, lead, "smollm2", 32000) for name, own, lead in asked]
    Record(header, rows).write(path)
    table = verified_answers_table(path)
    assert "| dense |  | 25.0 | 4.0 | 1.00 | 2 of 2 | 3 |  |" in table
    assert "| a | 4.00 | 25.0 | 2.0 | 2.00 | 1 of 2 | 2 | 0.125 |" in table


def test_the_lead_is_that_of_the_first_token_that_differs() -> None:
    """By log-probabilities behind what both answers have."""

    class Server:
        def log_probabilities(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
            return [{(9, 1): {2: -0.5, 5: -0.75}, (8,): {3: -1.0, 4: -3.0}}[tuple(prompt)][token] for token in tokens]

    dense = Answered(1.0, [[1, 2, 3], [3, 6, 7], [1, 1, 1]], [])
    other = Answered(1.0, [[1, 5, 9], [4, 6, 7], [1, 1, 1]], [])
    server: Any = Server()
    assert largest_lead(server, [[9], [8], [7]], dense, other) == 2.0
    assert largest_lead(server, [[9], [8], [7]], dense, dense) is None


def test_what_was_chosen_stands_beside_dense_answers_of_its_server(tmp_path: Path) -> None:
    chosen = {"decode": {"policy": "lowbit_top_k", "budget": 1024}}
    rows = [
        Chosen(ALWAYS, 8192, None, None, None, None, None, None, None, 1.0, 0.0, 0.004),
        Chosen(ALWAYS, 8192, 0.005, {"decode": {"policy": "dense"}}, 0.0, 1.0, None, None, None, 1.0, 0.0, 0.0041),
        Chosen(ALWAYS, 8192, 0.02, chosen, 0.015, 0.2, 0.01, 0.975, 0.9, 0.25, 0.0, 0.003),
    ]
    header = {"model": "a", "device": "H200", "commit": None, "prompts": 4, "tokens": 64, "text": "prose"}
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"header": header, "rows": [asdict(row) for row in rows]}))
    table = chosen_table(path)
    assert f"| {ALWAYS} | 8,192 | 0.005 | dense | 0.0000 |  |  | 100.0 | 4.10 | 4.00 |" in table
    assert f"| {ALWAYS} | 8,192 | 0.020 | lowbit_top_k 1,024 | 0.0150 | 0.0100 | 97.5 | 25.0 | 3.00 | 4.00 |" in table
