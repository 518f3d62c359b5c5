"""SparQ's selector on a GPU against the torch reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.gpu.selectors import (
    PAGE_SIZE,
    cache_on,
    check_equal,
    check_untouched,
    check_whole,
    integers,
    of_other_kinds,
    on_device,
    untouched,
)
from winnow_kernels.attend.gather import Meter
from winnow_kernels.batch import Count
from winnow_kernels.cache import LayerCache
from winnow_kernels.policies.sparq.gpu import select
from winnow_kernels.policies.sparq.parameters import SparQ
from winnow_kernels.policies.sparq.reference import SparQStep
from winnow_kernels.selection.gpu_top import TopBuffers, TopRows

SLOTS, KV_HEADS, GROUP, DIM = 2048, 2, 2, 64
LENGTHS, BUDGETS, CHANNELS, SINKS = [300, 40, 161, 17], [64, 0, 100, 200], [8, 0, 64, 3], [16, 0, 0, 4]


@pytest.mark.parametrize("in_order", [False, True])
def test_rows_are_the_references_and_other_kinds_stay_untouched(in_order: bool, device: torch.device) -> None:
    context = scattered_context(LENGTHS, SLOTS)
    cache = random_cache(SLOTS, KV_HEADS, DIM)
    queries = random_queries(len(LENGTHS), KV_HEADS * GROUP, DIM)
    batch = on_device(context, device)
    selection = untouched(batch, KV_HEADS, 256)
    rows = of_other_kinds(TopRows, len(LENGTHS), device)
    rows.budgets.copy_(torch.tensor(BUDGETS))
    rows.sinks.copy_(torch.tensor(SINKS))
    rows.by_score.fill_(int(in_order))
    channels = torch.tensor(CHANNELS, dtype=torch.int32, device=device)
    buffers = TopBuffers.empty(batch, selection)
    own = cache_on(device, cache)
    select(queries.to(device), own, batch, rows, channels, selection, buffers, any_by_score=in_order)

    for row, (budget, count, sinks) in enumerate(zip(BUDGETS, CHANNELS, SINKS, strict=True)):
        if budget == 0:
            check_untouched(selection, row)
            assert (batch.counts[row] == 0).all()
            continue
        of_row = SparQ.model_construct(budget=budget, budget_ratio=None, channels=count, sinks=sinks)
        meter = Meter(1, torch.device("cpu"))
        step = SparQStep(context.rows([row]), 1.0, None, [of_row], PAGE_SIZE)
        expected = step.select(0, queries[row : row + 1], cache, meter)
        # By score behind the newest page and the sinks; else in the context's order.
        always = (LENGTHS[row] - 1) % PAGE_SIZE + 1 + sinks
        check_equal(selection, row, expected, ordered=slice(always, None) if in_order else slice(0, 0))
        assert int(batch.counts[row, Count.READ_BYTES]) == int(meter.read_bytes)
    assert (buffers.histograms == 0).all()


def test_a_selection_that_has_no_room_is_the_whole_context(device: torch.device) -> None:
    context = scattered_context([300], SLOTS)
    cache = cache_on(device, LayerCache(*integers((2, SLOTS, KV_HEADS, DIM), 3, 1)))
    queries = integers((1, KV_HEADS * GROUP, DIM), 3, 3).to(device)
    batch = on_device(context, device)
    selection = untouched(batch, KV_HEADS, 64)
    rows = of_other_kinds(TopRows, 1, device)
    rows.budgets.fill_(65)
    channels = torch.full((1,), 8, dtype=torch.int32, device=device)
    buffers = TopBuffers.empty(batch, selection)
    select(queries, cache, batch, rows, channels, selection, buffers, any_by_score=False)
    check_whole(selection, 0)
