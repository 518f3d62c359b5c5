"""What the benchmark of whole layers makes of its arguments; that its requests are as a server's. Nothing is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.kernels.cases import Case, parse_cases, relative_error, wrong_errors
from benchmarks.kernels.decode_requests import measured_length
from benchmarks.kernels.layer import (
    TERMINATIONS,
    Contestant,
    Stage,
    averaged,
    contestants_of,
    full_reads_of,
    layers_for,
    roles_of,
    row_of,
    serve_union,
    table,
    with_sinks,
)
from benchmarks.kernels.timing import Timing
from benchmarks.model_shapes import shape_named
from winnow_kernels.batch import Count

LLAMA = shape_named("Llama-3.1-8B")


def test_cases() -> None:
    assert parse_cases("32768x8,1024x1") == [Case(32768, 8), Case(1024, 1)]


def test_contexts_end_within_a_span() -> None:
    assert measured_length(32768) == 32256
    assert measured_length(512) == 512


def test_policies_are_such_as_requests_ask_for() -> None:
    contestants = contestants_of([3, 12], LLAMA.delta_layers)
    names = [contestant.name for contestant in contestants]
    assert names == ["dense", "streaming_llm", "quest", "snapkv", "delta", "quoka", "tactic", "tactic"]
    for contestant in contestants:
        for termination in contestant.terminations:
            policy = contestant.policy(termination)
            assert policy.decode.policy == contestant.name
            assert (policy.early_termination is not None) == (termination == "never settled")
    assert [contestant.union for contestant in contestants[-2:]] == [0.03, 0.12]
    assert "delta" not in [contestant.name for contestant in contestants_of([3], [])]


def test_sparse_policies_are_timed_with_each_number_of_sinks() -> None:
    contestants = contestants_of([3], [2, 8])
    assert with_sinks(contestants, []) == contestants
    timed = with_sinks(contestants, [0, 16])
    sparse = [contestant.name for contestant in contestants if contestant.name != "dense"]
    assert [(each.name, each.parameters["sinks"]) for each in timed] == [
        (name, sinks) for name in sparse for sinks in (0, 16)
    ]
    asked = [each.policy("none").decode.model_dump()["sinks"] for each in timed]
    assert asked == [each.parameters["sinks"] for each in timed]


def test_layers_are_enough_to_leave_the_cache() -> None:
    plenty = 1 << 40
    small, large = Case(32768, 1), Case(131072, 8)
    layers = layers_for(small, LLAMA, plenty)
    *_, reuse = roles_of(layers, full_reads_of(32768 * LLAMA.token_bytes))
    assert len(reuse) * 1024 * LLAMA.token_bytes >= 3 * (50 << 20)
    assert layers_for(large, LLAMA, 5 * 131072 * 8 * LLAMA.token_bytes) == 5


@pytest.mark.parametrize("layers", [3, 4, 10, 46])
def test_every_role_has_layers(layers: int) -> None:
    roles = roles_of(layers, 4)
    assert [layer for role in roles for layer in role] == list(range(layers))
    assert all(roles)


def test_deltas_mean_layer() -> None:
    roles = {
        name: Stage("layer", Timing(microseconds, 0.01), read)
        for name, microseconds, read in (("full", 100.0, 1000.0), ("refresh", 120.0, 1100.0), ("reuse", 10.0, 50.0))
    }
    mean = averaged(roles, {"full": 2, "refresh": 4, "reuse": 26})
    assert mean.timing.microseconds == pytest.approx((200 + 480 + 260) / 32)
    assert mean.read_bytes == pytest.approx((2000 + 4400 + 1300) / 32)


def test_the_share_that_is_read_is_searched_for() -> None:
    class Requests:
        def serve(self, policy: Any) -> None:
            self.p = policy.decode.p

        def counts(self, layers: list[int]) -> dict[Count, float]:
            return {Count.ATTENDED: 0.3 * self.p**4, Count.CONTEXT: 1.0}

    requests: Any = Requests()
    found = serve_union(requests, Contestant("tactic", {"p": 0.9, "full_layers": 0}, union=0.03), "none")
    assert found["read_percent"] == pytest.approx(3, rel=0.02)
    assert found["p"] == pytest.approx(0.1**0.25, rel=0.02)


def test_rows() -> None:
    contexts: Any = SimpleNamespace(layer_bytes=1000)
    stage = Stage("layer", Timing(25.0, 0.01), 50.0, {"p": 0.8, "read_percent": 4.99})
    case = Case(32768, 8)
    row = row_of(case, "Llama-3.1-8B", "tactic", {"termination": "none"}, stage, Timing(250.0, 0.0), contexts)
    assert row.speedup == pytest.approx(10)
    # 5 % of the bytes would take 12.5 µs at dense decode's bandwidth.
    assert row.floor_ratio == pytest.approx(0.5)
    fields = "bench model policy parameters context batch dense measured unit speedup floor_ratio spread".split()
    assert list(json.loads(json.dumps(asdict(row)))) == fields
    step = row_of(
        case, "m", "tactic", {"termination": "none"}, Stage("step", Timing(5.0, 0.0)), Timing(9.0, 0), contexts
    )
    assert (step.speedup, step.floor_ratio) == (None, None)
    assert table([row, step]).row_count == 2


def test_errors_that_are_too_large_or_no_numbers() -> None:
    wrong = wrong_errors({"a": 0.005, "b": 0.02, "c": float("nan")})
    assert list(wrong) == ["b", "c"]
    assert relative_error(torch.tensor([3.03, 4.04]), torch.tensor([3.0, 4.0])) == pytest.approx(0.01, rel=1e-4)


def test_terminations_are_compared_with_none() -> None:
    assert TERMINATIONS[0] == "none"


def test_requests_are_as_the_references() -> None:
    """In Triton's interpreter, in a process of its own: the variable is read when Triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "WINNOW_CROSSOVER_TOKENS": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted_layers.py"))],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["errors"]) == 12
    assert wrong_errors(found["errors"]) == {}
    assert found["stages"] == ["step", "layer", "attend", "select"]
