"""What the benchmark of mixed batches asks, and what it makes of the answers. Nothing is timed, no server started."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from benchmarks.records import Record
from benchmarks.serving.batch_timing import BatchTiming
from benchmarks.serving.mixed import CAPPED, MIXED, PLAIN, TERMINATING, Mixture, mixtures_of, rows_of, table
from benchmarks.serving.serve import Cell, Contestant, Measured, parse_contestant
from benchmarks.serving.tables import mixed_table
from winnow_kernels.policies.attention_policy import parse_policy

ALONE = [parse_contestant(name) for name in ("snapkv", "quoka", "tactic", "lowbit_top_k")]


def test_a_mixed_batch_has_the_rows_of_its_policies_batches() -> None:
    by_group = {
        group: {each.name: each for each in mixtures_of(ALONE, {}, cap=512) if each.group == group}
        for group in (PLAIN, TERMINATING, CAPPED)
    }
    for of_group in by_group.values():
        assert list(of_group) == ["snapkv", "quoka", "tactic", "lowbit_top_k", MIXED]
        *alone, mixed = ([policy for policy in each.policies(8) if policy] for each in of_group.values())
        for policies in alone:
            ours = [parse_policy(policy) for policy in mixed if policy["decode"] == policies[0]["decode"]]
            assert ours == [parse_policy(policy) for policy in policies[:2]]
    ended = [("early_termination" in policy) for policy in by_group[TERMINATING][MIXED].policies(8) if policy]
    assert ended == [False] * 4 + [True] * 4
    capped = [policy["decode"].get("max_tokens") for policy in by_group[CAPPED][MIXED].policies(4) if policy]
    assert capped == [None, None, 512, None]


def test_a_cap_needs_a_policy_that_takes_it() -> None:
    assert {each.group for each in mixtures_of(ALONE[:2], {}, cap=None)} == {PLAIN, TERMINATING}
    with pytest.raises(typer.BadParameter, match="no policy takes max_tokens"):
        mixtures_of(ALONE[:2], {}, cap=512)


def measured(contestant: Contestant, milliseconds: float, context: int = 32768) -> Measured:
    timing = BatchTiming(
        1.0, 2.0, milliseconds / 1e3, 0.01, milliseconds / 1e3, milliseconds / 1e3, 100, 800.0, 0, None, None
    )
    return Measured("winnow", Cell(context, 8), contestant, 128, timing, 300_000, None)


def test_a_mixed_batch_is_beside_the_mean_of_its_policies() -> None:
    def of(name: str, group: str) -> Mixture:
        return Mixture.of(name, group, [{"decode": {"policy": "quest"}}])

    rows = rows_of(
        [
            measured(Contestant("dense", None), 12.0),
            measured(of("a", PLAIN), 5.0),
            measured(of("b", PLAIN), 7.0),
            measured(of(MIXED, PLAIN), 7.5),
            measured(of("a", TERMINATING), 8.0),
            measured(of(MIXED, TERMINATING), 10.0),
            measured(of("a", PLAIN), 50.0, context=98304),
            measured(of(MIXED, PLAIN), 55.0, context=98304),
        ],
        "Llama-3.1-8B",
    )
    found = [(row.policy, row.parameters["mean_alone"], row.parameters["times_the_mean"]) for row in rows]
    assert found == [
        ("dense", None, None),
        ("a", None, None),
        ("b", None, None),
        (MIXED, pytest.approx(6.0), pytest.approx(1.25)),
        ("a", None, None),
        (MIXED, pytest.approx(8.0), pytest.approx(1.25)),
        ("a", None, None),
        (MIXED, pytest.approx(50.0), pytest.approx(1.1)),
    ]
    assert [row.parameters["most"] for row in rows if row.policy == MIXED] == [1.25, 1.25, 1.10]
    assert [row.speedup for row in rows[:2]] == [pytest.approx(1.0), pytest.approx(2.4)]
    assert rows[-1].dense is None
    assert table(rows).row_count == len(rows)


def test_the_documentations_table_says_what_is_asked_of_mixed_batches_alone(tmp_path: Path) -> None:
    found = [
        measured(Contestant("dense", None), 12.0),
        measured(Mixture.of("a", PLAIN, [{"decode": {"policy": "quest"}}]), 5.0),
        measured(Mixture.of(MIXED, PLAIN, [{"decode": {"policy": "quest"}}]), 6.0),
    ]
    path = tmp_path / "mixed.json"
    Record({"device": "a GPU", "commit": None}, rows_of(found, "Llama-3.1-8B")).write(path)
    lines = mixed_table(path).splitlines()
    assert lines[2] == "| 32K × 8 | dense | dense | 12.00 | 1.00 |  |  |  |"
    assert lines[3] == "| 32K × 8 | plain | a | 5.00 | 2.40 |  |  |  |"
    assert lines[4] == "| 32K × 8 | plain | mixed | 6.00 | 2.00 |  | 1.20 | 1.25 |"
