"""The parameters and pages that a step's rows get."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.caches import scattered_context
from tests.kernels.gpu.compiling import compile_launches
from winnow_kernels.batch import DecodeBatch
from winnow_kernels.decode.gpu_page_table import copy_page_table
from winnow_kernels.decode.gpu_rows import (
    Columns,
    Layout,
    OwnParameters,
    Parameter,
    ParameterTable,
    RowParameters,
    float_bits,
)

LAYOUT = Layout(
    {
        "dense": Columns(),
        "by page": Columns(("pages", "full_layers")),
        "by share": Columns(("cap",)),
        "by token": Columns(("width", "budget"), of_ratio="budget"),
    }
)
TERMINATION = {
    Parameter.BY_SCORE: 1,
    Parameter.SCALE: float_bits(0.25),
    Parameter.DIRECTION: float_bits(0.5),
    Parameter.PATIENCE: float_bits(4.0),
}


def test_rows_get_their_own_kinds_parameters_once_they_are_long_enough(device: torch.device) -> None:
    table = ParameterTable(LAYOUT, 6, device)
    by_page = LAYOUT.columns_of("by page", OwnParameters({"pages": 7})) | {Parameter.SPARSE_FROM: 100}
    table.write(1, by_page | TERMINATION)
    table.write(2, LAYOUT.columns_of("by share", OwnParameters({"cap": 5}, share=0.9)))
    table.write(3, by_page)
    table.write(3, {})
    batch = DecodeBatch.empty(6, 256, 16, device)
    batch.lengths.copy_(torch.tensor([101, 100, 8, 200, 1, 1]))
    rows = RowParameters.empty(LAYOUT, 6, device)
    table.gather(torch.tensor([1, 1, 2, 3, 0, 0], device=device), batch, rows)

    expected = torch.zeros(LAYOUT.of_rows, 6, dtype=torch.int32)
    own = RowParameters(LAYOUT, expected, rows.shares, rows.thresholds)
    own.kinds[0], own.by_score[0], own.own("by page", "pages")[0] = 1, 1, 7
    own.kinds[2], own.own("by share", "cap")[2] = 2, 5
    assert torch.equal(rows.values.cpu(), expected)
    assert rows.shares.tolist() == [0, 0, 0.9, 0, 0, 0]
    assert rows.acting("by page").tolist() == [True, False, False, False, False, False]
    assert rows.acting("by share").tolist() == [False, False, True, False, False, False]
    never = [0, 0, math.inf]
    assert rows.thresholds.tolist() == [[0.25, 0.5, 4], *[never] * 5]


@settings(max_examples=30)
@given(ratio=st.floats(0.001, 1), length=st.integers(2, 200_000), sinks=st.integers(0, 100))
def test_a_share_of_the_tokens_is_what_python_makes_of_it(
    device: torch.device, ratio: float, length: int, sinks: int
) -> None:
    table = ParameterTable(LAYOUT, 2, device)
    own = OwnParameters({"width": 3}, ratio=ratio)
    table.write(1, LAYOUT.columns_of("by token", own) | {Parameter.SINKS: sinks})
    batch = DecodeBatch.empty(1, 16, 16, device)
    batch.lengths.fill_(length)
    rows = RowParameters.empty(LAYOUT, 1, device)
    table.gather(torch.ones(1, dtype=torch.int64, device=device), batch, rows)
    assert int(rows.own("by token", "width")[0]) == 3
    assert int(rows.own("by token", "budget")[0]) == max(math.ceil(ratio * (length - 1)), sinks) + 1


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


def _launch() -> None:
    device = torch.device("cpu")
    batch = DecodeBatch.empty(4, 512, 16, device)
    request_slots = torch.empty(4, dtype=torch.int64)
    table = ParameterTable(LAYOUT, 4, device)
    table.gather(request_slots, batch, RowParameters.empty(LAYOUT, 4, device))
    copy_page_table(torch.empty(4, 512, dtype=torch.int32), request_slots, request_slots, batch)


def test_they_compile_for_hopper() -> None:
    gathering, copying = compile_launches(_launch)
    assert gathering.local_bytes == copying.local_bytes == 0
