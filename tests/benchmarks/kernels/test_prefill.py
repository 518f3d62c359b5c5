"""What the benchmark of prefill makes of its arguments; that what it measures is right. Nothing is timed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.kernels.cases import wrong_errors
from benchmarks.kernels.dense_prefill import Chunk
from benchmarks.kernels.prefill import (
    PAGE_SIZE,
    Prompt,
    Stage,
    chunks_of,
    contestants_of,
    dense_operations,
    parse_launches,
    row_of,
    table,
)
from benchmarks.kernels.timing import Timing
from benchmarks.model_shapes import shape_named
from tests.benchmarks.kernels.interpreted import run_interpreted
from winnow_kernels.policies.quoka.prefill.attention import Launch
from winnow_kernels.prefill.blocks import WHOLE

CPU = torch.device("cpu")
SHAPE = replace(shape_named("tiny"), query_heads=4, kv_heads=2, head_dim=64)


def test_chunks() -> None:
    assert chunks_of(20, 8) == [Chunk(0, 8), Chunk(8, 16), Chunk(16, 20)]
    assert [chunk.tokens for chunk in chunks_of(16, 8)] == [8, 8]


def test_launches() -> None:
    assert parse_launches("128x64x8x3,64x32x4x2") == [Launch(), Launch(64, 32, 4, 2)]


def test_contestants() -> None:
    budget, ratio, whole = contestants_of([1024], [12], 128, [16])
    of_both = {"block": 128, "queries": 16, "dense_prefix": 0, "sinks": 16, "recency_ratio": 0.5}
    assert budget.labels == {"budget": 1024, **of_both}
    assert ratio.labels == {"budget_ratio": 0.12, **of_both}
    assert (budget.name, ratio.name, whole.name) == ("quoka", "quoka", "whole")
    chunk = Chunk(8192, 16384)
    assert [block.budget for block in budget.blocks(chunk)] == [1024] * 64
    assert {block.budget for block in whole.blocks(chunk)} == {WHOLE}


def test_prompts_tokens_lie_in_pages_of_their_own() -> None:
    prompt = Prompt(SHAPE, 70, 32, CPU, torch.float32)
    slots = prompt.slots(70)
    assert len(set(slots.tolist())) == 70
    assert int(slots.min()) >= PAGE_SIZE
    assert int(slots.max()) < prompt.inputs.cache.slots
    keys, _ = prompt.inputs.paged()
    assert torch.equal(keys[prompt.inputs.page_table[0].long()].flatten(0, 1)[:70], prompt.inputs.cache.keys[slots])


def test_rows() -> None:
    prompt = Prompt(SHAPE, 64, 32, CPU, torch.float32)
    operations = dense_operations(prompt)
    assert operations == 4 * 64 * 4 * (64 * 65 // 2)
    labels = {"backend": "winnow", "budget": 1024, "peak_bytes": 1 << 20}
    stage = Stage("layer", Timing(25.0, 0.01), operations / 20)
    row = row_of(32768, "Llama-3.1-8B", "quoka", labels, stage, Timing(250.0, 0.0), operations)
    assert row.speedup == pytest.approx(10)
    # A twentieth of the operations would take 12.5 µs at dense prefill's rate.
    assert row.floor_ratio == pytest.approx(0.5)
    fields = "bench model policy parameters context batch dense measured unit speedup floor_ratio spread".split()
    assert list(json.loads(json.dumps(asdict(row)))) == fields
    attend = row_of(32768, "m", "quoka", labels, Stage("attend", Timing(5.0, 0.0), 1.0), Timing(9.0, 0.0), operations)
    assert attend.speedup is None
    assert table([row, attend]).row_count == 2


def test_errors_that_are_too_large_or_no_numbers() -> None:
    assert list(wrong_errors({"a": 0.005, "b": 0.02, "c": float("nan")})) == ["b", "c"]


def test_a_small_prompt_is_as_torch_has_it() -> None:
    found = run_interpreted("interpreted_prefill.py")
    # Of QUOKA selection and output, of whole contexts and of what is compared with the output.
    assert len(found["errors"]) == 4
    assert wrong_errors(found["errors"]) == {}
    stages = [(row["policy"], row["parameters"]["stage"]) for row in found["rows"]]
    quoka = [("quoka", stage) for stage in ("layer", "attend", "select")]
    assert stages == [("dense", "layer"), *quoka, ("whole", "layer"), ("whole", "attend")]
    assert {row["measured"] for row in found["rows"]} == {2.0}
    dense, layer, attend, select, whole, _ = found["rows"]
    assert dense["floor_ratio"] == whole["floor_ratio"] == 1.0
    assert layer["floor_ratio"] == pytest.approx(attend["floor_ratio"] + select["floor_ratio"])
    assert 0 < attend["floor_ratio"] < 1
    assert layer["parameters"]["peak_bytes_beyond_dense"] == 0
