"""The parameters and pages that a step's rows get."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.caches import scattered_context
from tests.kernels.gpu.compiling import Variant, compile_for_hopper
from winnow_kernels.batch import DecodeBatch
from winnow_kernels.decode.gpu_page_table import copy_page_table
from winnow_kernels.decode.gpu_rows import (
    OF_ROWS,
    Family,
    Parameter,
    ParameterTable,
    RowParameters,
    double_bits,
    float_bits,
)

TERMINATION = {
    Parameter.BY_SCORE: 1,
    Parameter.SCALE: float_bits(0.25),
    Parameter.DIRECTION: float_bits(0.5),
    Parameter.PATIENCE: float_bits(4.0),
}


def test_rows_get_their_own_familys_parameters_once_they_are_long_enough(device: torch.device) -> None:
    table = ParameterTable(6, device)
    quest = {Parameter.FAMILY: Family.QUEST, Parameter.QUEST_PAGES: 7, Parameter.SPARSE_FROM: 100}
    tactic = {Parameter.FAMILY: Family.TACTIC, Parameter.TACTIC_P: double_bits(0.9), Parameter.TACTIC_CAP: 5}
    table.write(1, quest | TERMINATION)
    table.write(2, tactic)
    table.write(3, quest)
    table.write(3, {})
    batch = DecodeBatch.empty(6, 256, 16, device)
    batch.lengths.copy_(torch.tensor([101, 100, 8, 200, 1, 1]))
    rows = RowParameters.empty(6, device)
    table.gather(torch.tensor([1, 1, 2, 3, 0, 0], device=device), batch, rows)

    expected = torch.zeros(OF_ROWS, 6, dtype=torch.int32)
    expected[[Parameter.FAMILY, Parameter.BY_SCORE, Parameter.QUEST_PAGES], 0] = torch.tensor(
        [Family.QUEST, 1, 7], dtype=torch.int32
    )
    expected[[Parameter.FAMILY, Parameter.TACTIC_CAP], 2] = torch.tensor([Family.TACTIC, 5], dtype=torch.int32)
    assert torch.equal(rows.values.cpu(), expected)
    assert rows.shares.tolist() == [0, 0, 0.9, 0, 0, 0]
    never = [0, 0, math.inf]
    assert rows.thresholds.tolist() == [[0.25, 0.5, 4], *[never] * 5]


@settings(deadline=None, max_examples=30)
@given(ratio=st.floats(0.001, 1), length=st.integers(2, 200_000), sinks=st.integers(0, 100))
def test_a_share_of_the_tokens_is_what_python_makes_of_it(
    device: torch.device, ratio: float, length: int, sinks: int
) -> None:
    table = ParameterTable(2, device)
    own = {Parameter.FAMILY: Family.QUOKA, Parameter.QUOKA_RATIO: double_bits(ratio), Parameter.SINKS: sinks}
    table.write(1, own)
    batch = DecodeBatch.empty(1, 16, 16, device)
    batch.lengths.fill_(length)
    rows = RowParameters.empty(1, device)
    table.gather(torch.ones(1, dtype=torch.int64, device=device), batch, rows)
    assert int(rows[Parameter.QUOKA_BUDGET][0]) == max(math.ceil(ratio * (length - 1)), sinks) + 1


@pytest.mark.parametrize("page_size", [16, 32])
def test_a_page_table_is_that_of_the_slots(page_size: int, device: torch.device) -> None:
    lengths = [1, 16, 17, 500, 33]
    context = scattered_context(lengths, 2048, page_size)
    slots = torch.zeros(9, 512, dtype=torch.int32, device=device)
    own = torch.tensor([3, 8, 1, 2, 5], device=device)
    slots[own, :500] = context.slots.where(context.inside, 0).int().to(device)
    batch = DecodeBatch.empty(5, 512, page_size, device)
    batch.counts.fill_(3)
    copy_page_table(slots, own, context.lengths.to(device), batch)
    assert batch.lengths.tolist() == lengths
    assert (batch.counts == 0).all()
    for row, length in enumerate(lengths):
        pages = batch.page_table[row, : -(-length // page_size)].cpu()
        assert torch.equal(pages.long(), context.slots[row, :length:page_size] // page_size)


def test_they_compile_for_hopper() -> None:
    gather = {
        **dict.fromkeys(("table_ptr", "request_slots_ptr"), "*i64"),
        **dict.fromkeys(("families_ptr", "lengths_ptr", "values_ptr"), "*i32"),
        "shares_ptr": "*fp64",
        "thresholds_ptr": "*fp32",
        **dict.fromkeys(("rows", "table_stride"), "i32"),
    }
    copy = {
        **dict.fromkeys(("slots_ptr", "table_ptr", "own_lengths_ptr"), "*i32"),
        **dict.fromkeys(("request_slots_ptr", "lengths_ptr", "counts_ptr"), "*i64"),
        **dict.fromkeys(("slots_stride", "table_stride"), "i32"),
    }
    variants = [
        Variant(
            "winnow_kernels.decode.gpu_rows:_gather_kernel",
            gather,
            {"columns": OF_ROWS, "column_block": 16},
            num_warps=1,
        ),
        Variant(
            "winnow_kernels.decode.gpu_page_table:_copy_kernel", copy, {"columns": 8, "page_size": 16, "block": 1024}
        ),
    ]
    for compiled in compile_for_hopper(variants):
        assert compiled.local_bytes == 0
