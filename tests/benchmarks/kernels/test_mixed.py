"""The benchmark of mixed layers: what it compares, and that rows of its batches are what they are alone."""

from __future__ import annotations

import pytest

from benchmarks.kernels.mixed import MIXED, PLAIN, TERMINATING, table
from benchmarks.model_shapes import shape_named
from benchmarks.records import Row
from tests.benchmarks.kernels.interpreted import run_interpreted


def test_a_mixed_batch_is_checked_and_beside_its_policies() -> None:
    found = run_interpreted("interpreted_mixed.py", WINNOW_CROSSOVER_TOKENS="0")
    assert found["wrong"] == []
    assert found["changed"] == [0]
    rows = [Row(**row) for row in found["rows"]]
    assert [(row.parameters["group"], row.policy, row.parameters["launches"]) for row in rows] == [
        (group, policy, launches)
        for group in (PLAIN, TERMINATING)
        for policy, launches in (
            ("quest", "side by side"),
            ("snapkv", "side by side"),
            (MIXED, "side by side"),
            (MIXED, "one after another"),
        )
    ]
    # Of each layer a step's other work is a part.
    each = pytest.approx(2 + 2 / shape_named("tiny").layers)
    assert [row.measured for row in rows] == [each] * len(rows)
    beside = [(row.parameters["mean_alone"], row.parameters["times_the_mean"]) for row in rows[:4]]
    assert beside == [(None, None), (None, None), (each, pytest.approx(1.0)), (each, pytest.approx(1.0))]
    assert table(rows).row_count == len(rows)
