"""The plot: its lines are the policies', and it is the same for the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.evaluation.fidelity.test_record import row
from tests.plots import assert_readable
from winnow_evaluation.fidelity.plot import _looks, draw, lines_of
from winnow_kernels.policies.registry import DECODE_POLICIES

NEWEST = {"newest": 64}


def rows() -> list[dict[str, Any]]:
    found = [row(parameters={"budget": budget}, kv_read_ratio=budget / 4096, kl=32 / budget) for budget in (512, 256)]
    found += [
        row(policy="tactic", parameters={"p": p, "early_termination": {}}, kv_read_ratio=p, kl=1 - p)
        for p in (0.5, 0.9)
    ]
    found.append(row(policy="tactic", parameters={"p": 0.9}, kv_read_ratio=0.9, kl=0.05))
    found.append(row(policy="tactic", parameters={"p": 0.9}, kv_read_ratio=0.9, kl=0.05, preset="balanced"))
    found += [row(policy="oracle_top_p", parameters={"p": p}, kv_read_ratio=p / 5, kl=1e-2) for p in (0.5, 0.9)]
    found.append(row(policy="dense", parameters={"prompts_at_once": 1}, kv_read_ratio=1.0, kl=2e-3))
    return [*found, row(phase="prefill", policy="quoka", parameters={"budget": 256}, kv_read_ratio=0.6, kl=0.1)]


def test_a_line_is_a_policy_over_its_parameter() -> None:
    lines = {label: [row["kv_read_ratio"] for row in line] for label, line in lines_of(rows()).items()}
    assert lines == {
        "quest": [256 / 4096, 512 / 4096],
        "tactic, early termination": [0.5, 0.9],
        "tactic": [0.9],
        "oracle: best tokens that hold p": [0.1, 0.18],
    }


def test_bits_and_what_oracles_keep_are_lines_of_their_own() -> None:
    parameters = [{"p": 0.9, "bits": 2}, {"p": 0.95, "bits": 2}, {"p": 0.9, "bits": 3}]
    found = [row(policy="lowbit_top_p", parameters=each, kv_read_ratio=each["p"]) for each in parameters]
    found += [row(policy="oracle_top_p", parameters={"p": 0.9} | more, kv_read_ratio=0.1) for more in ({}, NEWEST)]
    assert {label: len(line) for label, line in lines_of(found).items()} == {
        "lowbit_top_p, 2 bits": 2,
        "lowbit_top_p, 3 bits": 1,
        "oracle: best tokens that hold p": 1,
        "oracle: best tokens that hold p, newest 64 kept": 1,
    }


def test_what_is_decoded_after_different_prefills_is_lines_of_their_own() -> None:
    prefills = [{"policy": "quoka", "budget_ratio": 0.25}, {"policy": "quoka", "budget": 1024}]
    found = [row(parameters={"budget": 512, "prefill": prefill}, kv_read_ratio=0.1) for prefill in prefills]
    assert [*lines_of(found)] == ["quest, quoka prefill 25 %", "quest, quoka prefill 1,024"]


def test_no_two_policies_look_alike(tmp_path: Path) -> None:
    found = [row(policy=name, parameters={"budget": 1}, kv_read_ratio=0.1, kl=0.1) for name in DECODE_POLICIES]
    draw(found, tmp_path / "plot.svg")
    looks = _looks([name for name in DECODE_POLICIES if name != "dense"])
    assert len({*looks.values()}) == len(DECODE_POLICIES) - 1


def test_policies_that_differ_otherwise_are_lines_of_their_own() -> None:
    window = [row(policy="snapkv", parameters={"budget": 256, "observation_window": size}) for size in (16, 32)]
    assert len(lines_of([each | {"kv_read_ratio": 0.1} for each in window])) == 2


def test_the_plot_is_readable_text(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    draw(rows(), path)
    drawn = path.read_text()
    root = ET.fromstring(drawn)
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    for expected in ("quest", "tactic, early termination", "noise floor: dense beside itself", "10 %"):
        assert expected in texts
    assert len(texts) > 10
    assert_readable(path)
    draw(rows(), path)
    assert path.read_text() == drawn


def test_a_floor_far_below_everything_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    draw([each | ({"kl": 1e-11} if each["policy"] == "dense" else {}) for each in rows()], path)
    assert "noise floor" not in path.read_text()


@pytest.mark.parametrize(
    ("bad", "message"), [([row(phase="prefill")], "no row"), ([row(), row(context=4096)], "the rows are of 2")]
)
def test_what_cannot_be_drawn_is_refused(bad: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        draw(bad, tmp_path / "plot.svg")
