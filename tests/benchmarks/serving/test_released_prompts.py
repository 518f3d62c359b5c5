"""How many requests run at once with ``release``: what the benchmark makes of answers, and a run on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.records import Record
from benchmarks.serving.batch_timing import Stream
from benchmarks.serving.released_prompts import Look, app, beside_dense, row_of
from benchmarks.serving.serve import Cell, Contestant, Plan
from benchmarks.serving.tables import released_table
from sglang_winnow import crossover

PLAN = Plan("tiny", [Cell(512, 2)], [], 100, 32, fresh=True, seed=0)


def _streams(seconds: float, released: int | None = None) -> list[Stream]:
    decode = {"released_tokens": released}
    return [
        Stream(0.0, [(1.0, 1), (seconds, 100)], 0, decode, 1),
        Stream(0.5, [(3.5, 1), (seconds - 1, 100)], 0, decode),
    ]


def test_what_is_held_and_fits() -> None:
    # The first look and the last are at others.
    looks = [Look(-1.0, 9, 9), Look(1.5, 1, 1000), Look(4.0, 2, 1200), Look(5.0, 2, 1230), Look(11.0, 9, 9)]
    row = row_of(Contestant("a", {}), _streams(10.0, 448), looks, 6512, PLAN)
    told = row.parameters
    assert (row.measured, row.unit, row.context, row.batch) == (20.0, "tokens/s", 512, 2)
    assert (told["run_at_once"], told["held_tokens"], told["fit"]) == (2, 512 + 100 - 448, 36)
    assert told["most_used_tokens"] == 1230
    assert told["mean_running"] == pytest.approx(5 / 3)
    assert (told["ttft"], told["longest_ttft"], told["released_tokens"], told["retractions"]) == (2.0, 3.0, 448.0, 1)


def test_nobody_is_seen() -> None:
    with pytest.raises(ValueError, match="more output tokens"):
        row_of(Contestant("a", {}), _streams(10.0), [Look(0.7, 0, 10)], 4096, PLAN)


def test_a_table_beside_dense(tmp_path: Path) -> None:
    looks = [Look(4.0, 2, 1200)]
    rows = [
        row_of(Contestant(name, policy), _streams(seconds), looks, 4096, PLAN)
        for name, policy, seconds in (("dense", None, 20.0), ("snapkv, released", {}, 10.0))
    ]
    path = tmp_path / "record.json"
    header = {"device": "H200", "commit": {"id": "abc", "modified": False}}
    Record(header, beside_dense(rows)).write(path)
    table = released_table(path)
    assert "2 requests of 512 tokens sent at once" in table
    assert "| snapkv, released | 2 | 2.0 | 612 | 5 | 20 | 2.00 | 2.0 | 3.0 | 1 |" in table


@pytest.mark.full
def test_more_run_at_once_with_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a CPU, steps of such short contexts are dense else.
    monkeypatch.setenv(crossover.ENVIRONMENT, "0")
    output = tmp_path / "record.json"
    policies = [
        f"{name}=" + json.dumps({"decode": {"policy": "snapkv", "budget": 64, "release": release}})
        for name, release in (("kept", False), ("released", True))
    ]
    options = ["--model", "tiny", "--context", "512", "--load", "6", "--output-tokens", "256"]
    options += ["--chunked-prefill-size", "512", "--server-arguments", "--max-total-tokens 2048 --page-size 16"]
    options += [word for policy in policies for word in ("--policy", policy)]
    result = CliRunner().invoke(app, [*options, "--output", str(output), "--log-folder", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = {row.policy: row for row in Record.read(output).rows}
    assert list(rows) == ["dense", "kept", "released"]
    assert rows["released"].parameters["run_at_once"] > rows["kept"].parameters["run_at_once"] > 0
    assert rows["released"].parameters["fit"] > rows["kept"].parameters["fit"]
    assert rows["released"].parameters["released_tokens"] == 512 - 64
    assert rows["released"].dense == rows["dense"].measured > 0
