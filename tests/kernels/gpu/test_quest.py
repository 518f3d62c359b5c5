"""Quest's selector on a GPU against the torch reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.gpu.selectors import (
    HALF,
    PAGE_SIZE,
    check_equal,
    check_untouched,
    check_whole,
    integers,
    of_other_kinds,
    on_device,
    untouched,
)
from tests.kernels.parameters import quest_parameters
from winnow_kernels.attend.gather import Meter
from winnow_kernels.batch import WHOLE_TO_THE_END, Count, DeviceSelection
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.policies.quest import gpu as quest
from winnow_kernels.policies.quest.reference import QuestStep
from winnow_kernels.selection.gpu_pages import MAX_PAGES, PageBuffers

SLOTS = 4096
CPU = torch.device("cpu")
# Budget in pages, full layers, whether the order matters.
Row = tuple[int, int, bool]


def _bounds(cache: LayerCache) -> PageBounds:
    bounds = PageBounds([cache] * 3, PageGenerations(cache.slots, PAGE_SIZE, CPU))
    bounds.ensure(torch.arange(cache.slots // PAGE_SIZE))
    return bounds


def _reference(row: int, context: Context, bounds: PageBounds, budget: int) -> QuestStep:
    return QuestStep(context.rows([row]), 1.0, None, [quest_parameters(budget * PAGE_SIZE, 0)], bounds)


def _select(
    layer: int,
    parameters: list[Row | None],
    context: Context,
    queries: Tensor,
    bounds: PageBounds,
    device: torch.device,
    width: int,
) -> tuple[DeviceSelection, list[int]]:
    """Returns the selection and the bytes that were counted for each row."""
    batch = on_device(context, device)
    rows = of_other_kinds(quest.QuestRows, batch.rows, device)
    for row, own in enumerate(parameters):
        if own is not None:
            rows.budgets[row], rows.full_layers[row], rows.by_score[row] = own
    kv_heads = bounds.bounds[layer].shape[1]
    selection = untouched(batch, kv_heads, width)
    buffers = PageBuffers.empty(batch.rows, kv_heads, batch.page_table.shape[1], device)
    quest.select(layer, queries.to(device), bounds.bounds[layer].to(device), batch, rows, selection, buffers)
    assert batch.counts.sum() == batch.counts[:, Count.READ_BYTES].sum()
    return selection, batch.counts[:, Count.READ_BYTES].tolist()


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "dtype"),
    [(2, 4, 64, HALF), (1, 5, 128, torch.float32), (2, 1, 96, torch.float16)],
)
def test_rows_are_the_references_and_other_families_stay_untouched(
    kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    cache = random_cache(SLOTS, kv_heads, head_dim, dtype=dtype)
    context = scattered_context([1300, 1, 17, 330, 90, 257, 400], SLOTS)
    queries = random_queries(7, kv_heads * group, head_dim).to(dtype)
    bounds = _bounds(cache)
    parameters: list[Row | None] = [
        (70, 0, True),
        (3, 1, False),
        (1, 0, True),
        None,
        (4, 1, False),
        (9, 2, True),
        (9, 1, False),
    ]

    selection, read = _select(1, parameters, context, queries, bounds, device, width=1120)

    for row, own in enumerate(parameters):
        if own is None:
            check_untouched(selection, row)
            assert read[row] == 0
            continue
        budget, full_layers, is_ordered = own
        if full_layers > 1:
            check_whole(selection, row, WHOLE_TO_THE_END)
            assert read[row] == 0
            continue
        meter = Meter(1, CPU)
        expected = _reference(row, context, bounds, budget).select(1, queries[[row]], cache, meter)
        in_newest = (int(context.lengths[row]) - 1) % PAGE_SIZE + 1
        check_equal(selection, row, expected, ordered=slice(None if is_ordered else in_newest))
        assert read[row] == int(meter.read_bytes)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_of_equal_scores_the_earlier_page_comes_first(is_ordered: bool, device: torch.device) -> None:
    kv_heads, group, head_dim = 2, 4, 64
    keys = integers((SLOTS, kv_heads, head_dim), 1, seed=0)
    # A few channels with another number for each page: not all pages reach the highest score.
    keys[:, :, :5] *= integers((SLOTS // PAGE_SIZE, kv_heads, 5), 2, seed=2).repeat_interleave(PAGE_SIZE, 0)
    keys[:, :, 5:] = 0
    cache = LayerCache(keys, keys)
    context = scattered_context([603, 500], SLOTS)
    queries = integers((2, kv_heads * group, head_dim), 1, seed=1)
    bounds = _bounds(cache)

    selection, _ = _select(0, [(13, 0, is_ordered)] * 2, context, queries, bounds, device, width=400)

    for row in range(2):
        newest = (int(context.lengths[row]) - 1) // PAGE_SIZE
        pages = context.slots[[row], : newest * PAGE_SIZE : PAGE_SIZE] // PAGE_SIZE
        grouped = queries[[row]].view(1, kv_heads, group, head_dim)
        upper = bounds.upper_scores(0, grouped, pages, torch.tensor([newest]), Meter(1, CPU)).amax(2)[0]
        in_newest = int(context.lengths[row]) - newest * PAGE_SIZE
        for head in range(kv_heads):
            ranked = upper[head].sort(descending=True, stable=True)
            assert ranked.values[0] > ranked.values[11] == ranked.values[12]
            best = ranked.indices[:12]
            own = selection.slots[row, head, in_newest : in_newest + 12 * PAGE_SIZE : PAGE_SIZE].cpu() // PAGE_SIZE
            expected = pages[0, best]
            assert own.tolist() == (expected if is_ordered else pages[0, best.sort().values]).tolist()


def test_a_row_is_the_same_whatever_its_neighbours(device: torch.device) -> None:
    cache, context = random_cache(SLOTS, 2, 64), scattered_context([1100, 300, 90], SLOTS)
    queries, bounds = random_queries(3, 8, 64), _bounds(cache)
    parameters: list[Row | None] = [(9, 0, False), (7, 0, False), (2, 0, True)]
    together, _ = _select(0, parameters, context, queries, bounds, device, width=160)
    for row in range(3):
        alone, _ = _select(0, [parameters[row]], context.rows([row]), queries[[row]], bounds, device, width=160)
        assert torch.equal(alone.slots[0], together.slots[row])
        assert torch.equal(alone.counts[0], together.counts[row])


def test_a_selection_that_has_no_room_is_the_whole_context(device: torch.device) -> None:
    cache, context = random_cache(SLOTS, 2, 64), scattered_context([200, 199], SLOTS)
    selection, read = _select(
        0, [(8, 0, False)] * 2, context, random_queries(2, 8, 64), _bounds(cache), device, width=119
    )
    check_whole(selection, 0)
    assert (selection.counts[1] == 119).all()
    assert read[0] == 0


def test_contexts_that_no_program_can_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^pages: "):
        PageBuffers.empty(1, 1, MAX_PAGES + 1, CPU)
