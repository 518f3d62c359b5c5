"""The benchmark of mixed layers: what it compares, and that rows of its batches are what they are alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kernels.mixed import MIXED, PLAIN, TERMINATING, table
from benchmarks.model_shapes import shape_named
from benchmarks.records import Row


def test_a_mixed_batch_is_checked_and_beside_its_policies() -> None:
    """In Triton's interpreter, in a process of its own: the variable is read when Triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "WINNOW_CROSSOVER_TOKENS": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted_mixed.py"))],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
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
