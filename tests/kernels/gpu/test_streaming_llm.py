"""StreamingLLM's selector on a GPU against the torch reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.gpu.selectors import check_equal, check_untouched, check_whole, of_other_kinds, on_device, untouched
from tests.kernels.parameters import streaming_llm_parameters
from winnow_kernels.attend.gather import Meter
from winnow_kernels.policies.streaming_llm.gpu import StreamingLLMRows, select
from winnow_kernels.policies.streaming_llm.reference import StreamingLLMStep

SLOTS = 4096


def _rows(parameters: list[tuple[int, int] | None], device: torch.device) -> StreamingLLMRows:
    rows = of_other_kinds(StreamingLLMRows, len(parameters), device)
    for row, own in enumerate(parameters):
        if own is not None:
            rows.sinks[row], rows.window[row] = own
    return rows


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_rows_are_the_references_and_other_families_stay_untouched(kv_heads: int, device: torch.device) -> None:
    context = scattered_context([1400, 1, 3, 200, 40, 33], SLOTS)
    parameters = [(4, 1100), (4, 8), (5, 1), None, (0, 16), (4, 1000)]
    batch = on_device(context, device)
    selection = untouched(batch, kv_heads, 1104)

    select(batch, _rows(parameters, device), selection)

    cache, queries = random_cache(SLOTS, kv_heads, 8), random_queries(1, kv_heads, 8)
    for row, own in enumerate(parameters):
        if own is None:
            check_untouched(selection, row)
            continue
        step = StreamingLLMStep(context.rows([row]), 1.0, None, [streaming_llm_parameters(*own)])
        check_equal(selection, row, step.select(0, queries, cache, Meter(1, torch.device("cpu"))))
    assert (batch.counts == 0).all()


def test_a_selection_that_has_no_room_is_the_whole_context(device: torch.device) -> None:
    context = scattered_context([200, 70], SLOTS)
    batch = on_device(context, device)
    selection = untouched(batch, 2, 100)
    select(batch, _rows([(4, 97), (4, 97)], device), selection)
    check_whole(selection, 0)
    assert (selection.counts[1] == 70).all()
