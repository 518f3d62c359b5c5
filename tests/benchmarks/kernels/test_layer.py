"""What the benchmark of whole layers makes of its arguments; that its requests are as a server's. Nothing is timed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.kernels.captured_keys import CapturedKeys
from benchmarks.kernels.cases import Case, parse_cases, relative_error, wrong_errors
from benchmarks.kernels.decode_requests import Contexts, Heads, measured_length, there_and_back
from benchmarks.kernels.layer import (
    TERMINATIONS,
    Contestant,
    Stage,
    Timer,
    averaged,
    contestants_of,
    full_reads_of,
    kernels_of,
    layers_for,
    on_real_keys,
    roles_of,
    row_of,
    serve_union,
    table,
    with_sinks,
)
from benchmarks.kernels.timing import Timing, times_by_place
from benchmarks.model_shapes import shape_named
from tests.benchmarks.kernels.interpreted import run_interpreted
from winnow_kernels.batch import Count

LLAMA = shape_named("Llama-3.1-8B")
LOWBIT = [*["lowbit_top_p"] * 2, *["lowbit_top_k"] * 2]


def test_cases() -> None:
    assert parse_cases("32768x8,1024x1") == [Case(32768, 8), Case(1024, 1)]


def test_contexts_end_within_a_span() -> None:
    assert measured_length(32768) == 32256
    assert measured_length(512) == 512


def test_policies_are_such_as_requests_ask_for() -> None:
    contestants = contestants_of([3, 12], LLAMA.delta_layers)
    names = [contestant.name for contestant in contestants]
    assert names == ["dense", "streaming_llm", "quest", "snapkv", "delta", "quoka", *["tactic"] * 2, *LOWBIT]
    for contestant in contestants:
        for termination in contestant.terminations:
            policy = contestant.policy(termination)
            assert policy.decode.policy == contestant.name
            assert (policy.early_termination is not None) == (termination == "never settled")
    assert [contestant.union for contestant in contestants[-6:]] == [0.03, 0.12, 0.03, 0.12, None, None]
    assert [contestant.decode["budget_ratio"] for contestant in contestants[-2:]] == [0.03, 0.12]
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
    assert layers_for(large, LLAMA, 5 * 131072 * 8 * LLAMA.token_bytes, dtype=torch.float8_e4m3fn) == 10
    assert layers_for(small, LLAMA, plenty, dtype=torch.float8_e4m3fn) >= layers


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


def test_keys_and_values_may_be_narrower_than_queries() -> None:
    heads, cpu = Heads(query=4, kv=2, dim=64), torch.device("cpu")
    wide, narrow = (
        Contexts(heads, 80, 2, 1, cpu, torch.bfloat16, cache_dtype=dtype) for dtype in (None, torch.float8_e4m3fn)
    )
    assert (wide.kv_cache_dtype, narrow.kv_cache_dtype) == ("bfloat16", "float8_e4m3fn")
    assert narrow.queries.dtype == torch.bfloat16
    assert 2 * narrow.layer_bytes == wide.layer_bytes
    assert torch.equal(narrow.caches[0].keys.float(), wide.caches[0].keys.to(torch.float8_e4m3fn).float())


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


def test_steps_are_timed_beside_their_neighbours() -> None:
    assert there_and_back(4) == [0, 1, 2, 3, 2, 1]
    assert there_and_back(1) == [0]
    made: list[tuple[int, int]] = []
    timed: list[int] = []

    def time(calls: Sequence[Callable[[], None]], replays: int) -> Timing:
        timed.append(len(calls))
        for call in calls:
            call()
        return Timing(1.0, 0.0)

    contexts: Any = None
    timer = Timer(contexts, cache_bytes=100, replays=2, time=time)
    timer(lambda layer, step: made.append((layer, step)), range(3), 30, there_and_back(3))
    # Ten calls would leave the cache; they are twelve, for whole rounds of three layers in four steps.
    assert timed == [12]
    assert made == [(layer, step) for step in (0, 1, 2, 1) for layer in range(3)]
    timer(lambda _layer, _step: None, range(3), 30)
    assert timed == [12, 10]


def test_queries_drift_and_keep_their_length() -> None:
    contexts = Contexts(Heads(query=4, kv=2, dim=64), 64, 2, 3, torch.device("cpu"), torch.float32)
    steps = [contexts.queries_of(1, step).double() for step in range(contexts.steps)]
    assert torch.equal(steps[0].float(), contexts.queries)
    for before, after in pairwise(steps):
        assert float((after.norm(dim=-1) / before.norm(dim=-1) - 1).abs().max()) < 0.25
        assert torch.cosine_similarity(before, after, dim=-1).mean() == pytest.approx(0.9, abs=0.05)


def test_a_models_keys() -> None:
    keys, queries = torch.randn(2, 48, 3, 64), torch.randn(2, 6, 9, 64)
    captured = CapturedKeys("m", keys, queries)
    contexts = Contexts(Heads(9, 3, 64), 112, 4, 5, torch.device("cpu"), torch.float32, captured=captured)
    slots = contexts.table[1:, :112].long()
    expected = torch.cat((keys[1, :16], keys[1], keys[1]))
    # Layers are the captured ones in turn.
    for row in range(4):
        assert torch.equal(contexts.caches[3].keys[slots[row]], expected)
    assert contexts.steps == 3
    assert torch.equal(contexts.queries_of(4, 2), queries[0, 2:6])
    with pytest.raises(ValueError, match="at least the 48 tokens"):
        captured.tiled(47)
    with pytest.raises(ValueError, match="6 rows need at least 7"):
        captured.queries_of_rows(6)


def test_a_models_keys_in_a_file(tmp_path: Path) -> None:
    captured = CapturedKeys("m", torch.randn(2, 48, 3, 64).bfloat16(), torch.randn(2, 6, 9, 64).bfloat16())
    captured.write(tmp_path / "captured.pt")
    found = CapturedKeys.read(tmp_path / "captured.pt")
    assert found.model == "m"
    assert torch.equal(found.keys, captured.keys)
    assert torch.equal(found.queries, captured.queries)
    torch.save({"keys": captured.keys}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="holds no captured keys"):
        CapturedKeys.read(tmp_path / "other.pt")


def test_kernels_are_told_apart_by_their_place() -> None:
    launches = [("score", 5.0), ("cut", 1.0), ("score", 2.0), ("score", 7.0), ("cut", 1.0), ("score", 2.0)]
    found = times_by_place(launches, 2)
    assert list(found) == ["score", "cut", "score, 2"]
    assert [timing.microseconds for timing in found.values()] == [6.0, 1.0, 2.0]
    with pytest.raises(RuntimeError, match="sees no kernels"):
        times_by_place([], 2)
    with pytest.raises(RuntimeError, match="not launched the same kernels"):
        times_by_place(launches[:-1], 2)


def test_kernels_that_cannot_be_told_apart_are_left_out_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    def kernels(calls: Sequence[Callable[[], None]]) -> dict[str, Timing]:
        return times_by_place([("score", float(number)) for number, _ in enumerate(calls) if seen], len(calls))

    contexts = SimpleNamespace(layers=2)
    requests: Any = SimpleNamespace(contexts=contexts, walk=[0, 1], attend=print)
    timer = Timer(requests.contexts, cache_bytes=100, replays=2, kernels=kernels)
    seen = True
    [stage] = kernels_of(requests, timer, {"p": 0.9})
    assert (stage.name, stage.timing.microseconds, stage.more) == ("kernel score", 1.5, {"p": 0.9})
    seen = False
    assert list(kernels_of(requests, timer, {})) == []
    assert "the profiler sees no kernels" in capsys.readouterr().out


def test_policies_on_real_keys() -> None:
    contestants = on_real_keys([0.9], [512])
    asked = [contestant.policy("none").decode.model_dump(exclude_unset=True) for contestant in contestants]
    assert asked == [{"policy": "lowbit_top_p", "p": 0.9}, {"policy": "lowbit_top_k", "budget": 512}]


def test_rows() -> None:
    contexts: Any = SimpleNamespace(layer_bytes=1000, kv_cache_dtype="bfloat16")
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


# A minute and a half: kernels for every policy of the benchmark are interpreted.
@pytest.mark.full
def test_requests_are_as_the_references() -> None:
    found = run_interpreted("interpreted_layers.py", WINNOW_CROSSOVER_TOKENS="0")
    assert len(found["errors"]) == 16
    assert wrong_errors(found["errors"]) == {}
    assert found["stages"] == ["step", "layer", "attend", "select"]
    assert [stage["name"] for stage in found["coded"]] == ["step", "layer", "attend", "select", "build"]
    # The newest 64 tokens and the rest of their page are always read.
    assert 100 * 72 / 200 <= found["coded"][1]["more"]["read_percent"] < 75
    assert found["coded"][1]["more"].keys() == {"read_percent", "marked_again_percent", "counted_again_percent"}


def test_requests_with_a_cache_of_8_bits_are_as_the_references() -> None:
    found = run_interpreted("interpreted_narrow.py", WINNOW_CROSSOVER_TOKENS="0")
    assert len(found["errors"]) == 2
    assert wrong_errors(found["errors"]) == {}
    wide, narrow = found["triton"]
    assert wide < 1e-5
    # SGLang's kernels multiply in 8 bits what is stored in 8.
    assert narrow < 0.1
