"""What the GPU benchmark of attention makes of its arguments and measurements. Nothing is timed here."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from benchmarks.kernels.attend import (
    KV_HEADS,
    PAGE_SIZE,
    Inputs,
    dense_bytes,
    layers_that_fit,
    measurements,
    parse_launches,
    row_of,
    table,
)
from benchmarks.kernels.cases import Case, parse_cases, relative_error
from benchmarks.kernels.timing import Timing, calls_beyond_cache, summary
from winnow_kernels.attend.gpu import Launch

CPU = torch.device("cpu")


def test_cases() -> None:
    assert parse_cases("32768x8,1024x1") == [Case(32768, 8), Case(1024, 1)]
    # 128 KiB a token of an 8B model's 32 layers.
    assert 32 * dense_bytes(parse_cases("32768x8")[0]) == 32768 * 8 * (128 << 10)


def test_layers_that_fit() -> None:
    case = Case(32768, 8)
    assert layers_that_fit(case, 5 * dense_bytes(case) - 1) == 4
    assert layers_that_fit(case, 5 * dense_bytes(case) - 1, torch.float8_e4m3fn) == 9
    assert layers_that_fit(case, dense_bytes(case) - 1) == 0
    assert layers_that_fit(case, 1000 * dense_bytes(case)) == 32


def test_calls_read_more_than_the_cache_holds() -> None:
    cache = 50 << 20
    assert calls_beyond_cache(1 << 30, cache) == 4
    assert calls_beyond_cache(5 << 20, cache) == 30
    assert calls_beyond_cache(1, cache) == 256


def test_summary_of_replays() -> None:
    timing = summary([4.0, 1.0, 2.0, 3.0, 5.0])
    assert timing.microseconds == 3.0
    assert timing.spread == pytest.approx(2 / 3)


def test_a_row_has_the_fields_of_every_record() -> None:
    parameters = {"share": 5, "termination": "none", "launch": "4,2,2,2"}
    row = row_of(Case(32768, 8), "tokens", parameters, Timing(250.0, 0.0), Timing(25.0, 0.01))
    assert row.speedup == pytest.approx(10)
    # 5 % of the bytes would take 12.5 µs at dense decode's bandwidth.
    assert row.floor_ratio == pytest.approx(0.5)
    fields = "bench model policy parameters context batch dense measured unit speedup floor_ratio spread".split()
    assert list(json.loads(json.dumps(asdict(row)))) == fields
    assert table([row]).row_count == 1


def test_measurements_compare_termination_with_none() -> None:
    listed = list(measurements([5]))
    for name in ("none", "infinite patience", "never settled"):
        assert ("whole", 100, name) in listed
        assert ("tokens", 5, name) in listed
    assert list(measurements([0.5], ["tokens", "pages"], ["none"])) == [("tokens", 0.5, "none"), ("pages", 0.5, "none")]


def test_launches() -> None:
    assert parse_launches("shipped triton") == {"shipped": None, "triton": Launch.of(128, 2, 4)}
    assert parse_launches("8,3,1,1 4,2,2,2") == {"8,3,1,1": Launch(8, 3, 1, 1), "4,2,2,2": Launch(4, 2, 2, 2)}
    assert parse_launches("triton", torch.float8_e4m3fn) == {"triton": Launch.of(128, 1, 4)}


@pytest.mark.parametrize("policy", ["tokens", "pages"])
def test_selections_are_distinct_tokens_of_the_row(policy: str) -> None:
    inputs = Inputs(Case(320, 2), layers=1, device=CPU)
    selection = inputs.select(policy, 25)
    assert selection.counts.tolist() == [[80] * KV_HEADS] * 2
    for row in range(2):
        pages = set(inputs.batch.page_table[row].tolist())
        for slots in selection.slots[row].tolist():
            assert len(set(slots)) == 80
            assert {slot // PAGE_SIZE for slot in slots} <= pages


def test_relative_error() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(expected * 1.01, expected) == pytest.approx(0.01, rel=1e-4)
