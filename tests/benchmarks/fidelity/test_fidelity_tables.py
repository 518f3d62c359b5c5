"""The documentation's tables of fidelity are made of the record's rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fidelity.fidelity_tables import changes_table, contexts_table, fidelity_table, summary_table
from tests.evaluation.fidelity.test_record import row
from winnow_evaluation.fidelity.record import FidelityRecord

RUN = {
    "model": "m",
    "prompts": 2,
    "tokens_each": 4,
    "text": "prose",
    "device": "CPU",
    "dtype": "float32",
    "commit": None,
}
SHARES = {"loss_change": 0.01, "kv_read_ratio": 0.3, "attended_ratio": 0.2, "intervals": {"kl": [0.2, 0.3]}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tactic = {"policy": "tactic", "parameters": {"p": 0.9}, "reported_share": 0.95, "true_share": 0.93}
    tactic |= {"share_error": 0.02, "success": 0.8, "worst_layer": {"layer": 7, "true_share": 0.5}}
    rows = [row(context=1024, **SHARES), row(**SHARES), row(**SHARES | tactic)]
    rows.append(row(**SHARES, policy="snapkv", parameters={"budget": 1024}))
    rows.append(row(**SHARES, phase="prefill", policy="quoka", parameters={"budget_ratio": 0.25}))
    # Once a preset, and a preset by its parameters alone.
    rows.append(row(**SHARES, preset="fast"))
    rows.append(row(**SHARES, policy="lowbit_top_k", parameters={"sinks": 16, "budget": 512, "bits": 2}))
    rows += [row(**SHARES, policy="lowbit_top_p", parameters={"p": 0.9, "bits": bits}) for bits in (2, 3)]
    rows += [row(**SHARES, policy="oracle_top_p", parameters={"p": 0.9} | more) for more in ({}, {"newest": 64})]
    path = tmp_path / "fidelity.json"
    FidelityRecord([RUN], rows).write(path)
    return path


def test_the_longest_context_is_told_in_full(path: Path) -> None:
    table = fidelity_table(path)
    assert (
        "| m | 2,048 | decode: tactic p 0.9 | 0.2500 [0.2000, 0.3000] | 50.0 | +0.010 | 30.0 | 20.0 | 0.950 | 0.930 |"
        " +0.020 |  | 80.0 | 7 (0.500) |" in table
    )
    assert "prefill: quoka ratio 0.25" in table
    assert "| m | 1,024 |" not in table
    assert table.endswith("m, 2 prompts × 4 tokens of prose, CPU, float32, commit unknown.\n")


def test_each_context_has_a_column(path: Path) -> None:
    lines = contexts_table(path).splitlines()
    assert lines[0] == "| KL, nats (KV read %) | m, 1,024 | m, 2,048 |"
    assert sum("quest" in line for line in lines) == 1
    assert "| decode: quest budget 512 | 0.2500 (30.0) | 0.2500 (30.0) |" in lines
    assert "| decode: tactic p 0.9 |  | 0.2500 (30.0) |" in lines
    assert "| decode: lowbit_top_p p 0.9, 3 bits |  | 0.2500 (30.0) |" in lines
    assert "| decode: oracle top-p p 0.9 newest 64 |  | 0.2500 (30.0) |" in lines


def test_the_summary_has_one_row_of_each_policy_and_the_presets(path: Path) -> None:
    shown = [line.split(" | ")[2] for line in summary_table(path).splitlines()[2:]]
    assert shown == [
        "tactic p 0.9",
        "snapkv budget 1,024",
        "fast: lowbit_top_k budget 512, 2 bits",
        "lowbit_top_p p 0.9, 2 bits",
        "oracle top-p p 0.9",
    ]


def test_changes_are_told_with_the_parameters_that_changed(tmp_path: Path) -> None:
    rows = [row(**SHARES, policy="tactic", parameters={"p": 0.9, "sinks": sinks}) for sinks in (0, 16)]
    rows.append(row(**SHARES, policy="dense", parameters={}))
    path = tmp_path / "changes.json"
    FidelityRecord([RUN], rows).write(path)
    shown = [line.split(" | ")[:3] for line in changes_table(path).splitlines()[2:4]]
    assert shown == [["| decode: tactic p 0.9", f"`sinks` {sinks}", "0.2500 [0.2000, 0.3000]"] for sinks in (0, 16)]
    assert "dense" not in changes_table(path)
