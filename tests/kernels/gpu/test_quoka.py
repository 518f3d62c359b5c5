"""QUOKA's selector in decode on a GPU against the torch reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.gpu.selectors import (
    PAGE_SIZE,
    UNTOUCHED,
    cache_on,
    check_equal,
    check_untouched,
    check_whole,
    of_other_kinds,
    on_device,
    untouched,
)
from tests.kernels.parameters import quoka_decode_parameters
from winnow_kernels.attend.gather import Meter
from winnow_kernels.batch import Count, DeviceSelection
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.indexes.key_norms import KeyNorms
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.policies.quoka import gpu as quoka
from winnow_kernels.policies.quoka.reference import QuokaStep
from winnow_kernels.selection.gpu_top import MAX_CANDIDATES, TopBuffers, TopRows

SLOTS = 6144
CPU = torch.device("cpu")
# Budget in tokens, whether the order matters.
Row = tuple[int, bool]


def _norms(cache: LayerCache) -> KeyNorms:
    norms = KeyNorms([cache], PageGenerations(cache.slots, PAGE_SIZE, CPU))
    norms.ensure(torch.arange(cache.slots // PAGE_SIZE))
    return norms


@dataclass(frozen=True)
class Selected:
    """What the kernels wrote, and the bytes that they counted for each row."""

    selection: DeviceSelection
    read: list[int]


def _select(
    parameters: list[Row | None],
    context: Context,
    queries: Tensor,
    cache: LayerCache,
    norms: KeyNorms,
    device: torch.device,
    width: int,
) -> Selected:
    batch = on_device(context, device)
    rows = of_other_kinds(TopRows, batch.rows, device)
    for row, own in enumerate(parameters):
        if own is not None:
            rows.budgets[row], rows.by_score[row] = own
    selection = untouched(batch, cache.kv_heads, width)
    buffers = TopBuffers.empty(batch, selection)
    quoka.select(
        queries.to(device),
        cache_on(device, cache),
        norms.reciprocals[0].to(device),
        batch,
        rows,
        selection,
        buffers,
        any_by_score=any(own is not None and own[1] for own in parameters),
    )
    assert (buffers.histograms == 0).all()
    assert batch.counts.sum() == batch.counts[:, Count.READ_BYTES].sum()
    return Selected(selection, batch.counts[:, Count.READ_BYTES].tolist())


def _in_newest(context: Context, row: int) -> int:
    return (int(context.lengths[row]) - 1) % PAGE_SIZE + 1


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "dtype"),
    [(2, 4, 64, torch.bfloat16), (1, 5, 128, torch.float32), (2, 1, 96, torch.float16)],
)
def test_rows_are_the_references_and_other_families_stay_untouched(
    kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    cache = random_cache(SLOTS, kv_heads, head_dim, dtype=dtype)
    context = scattered_context([1300, 1, 17, 330, 90, 48, 1100], SLOTS)
    queries = random_queries(7, kv_heads * group, head_dim).to(dtype)
    norms = _norms(cache)
    parameters: list[Row | None] = [
        (150, True),
        (3, False),
        (200, True),
        None,
        (4, False),
        (47, True),
        (1099, False),
    ]

    selected = _select(parameters, context, queries, cache, norms, device, width=1120)

    for row, own in enumerate(parameters):
        if own is None:
            check_untouched(selected.selection, row)
            assert selected.read[row] == 0
            continue
        budget, is_ordered = own
        meter = Meter(1, CPU)
        step = QuokaStep(context.rows([row]), 1.0, None, [quoka_decode_parameters(budget=budget)], norms)
        expected = step.select(0, queries[[row]], cache, meter)
        ordered = slice(_in_newest(context, row), None) if is_ordered else slice(0)
        check_equal(selected.selection, row, expected, ordered=ordered)
        newest = context.slots[row, int(context.lengths[row]) - _in_newest(context, row) : int(context.lengths[row])]
        assert (selected.selection.slots[row, :, : len(newest)].cpu() == newest).all()
        assert selected.read[row] == int(meter.read_bytes)


def _check_best(selection: DeviceSelection, context: Context, promise: Tensor, wanted: int, is_ordered: bool) -> None:
    """Compare the only row with a stable sort of ``promise``, [tokens before the newest page], for all KV heads."""
    best = promise.sort(descending=True, stable=True).indices[:wanted]
    expected = context.slots[0, best if is_ordered else best.sort().values]
    in_newest = _in_newest(context, 0)
    own = selection.slots[0, :, in_newest : in_newest + wanted].cpu()
    assert (selection.counts[0] == in_newest + wanted).all()
    assert (selection.slots[0, :, in_newest + wanted :] == UNTOUCHED).all()
    assert (own.sort().values == expected.sort().values).all()
    if is_ordered:
        assert (own == expected).all()


@pytest.mark.parametrize("is_ordered", [False, True])
def test_of_equal_scores_the_earlier_key_comes_first(is_ordered: bool, device: torch.device) -> None:
    # Keys along the axes: cosines are exact, and there are six of them.
    generator = torch.Generator().manual_seed(0)
    axes = torch.randint(0, 6, (SLOTS,), generator=generator)
    keys = torch.zeros(SLOTS, 1, 64)
    keys[torch.arange(SLOTS), 0, axes] = 2.0
    cache = LayerCache(keys, keys)
    context = scattered_context([603], SLOTS)
    queries = torch.zeros(1, 4, 64)
    queries[:, :, :6] = torch.tensor([4.0, 1.0, 1.0, -2.0, -1.0, 0.0])
    for wanted in (1, 100, 591):
        budget = wanted + _in_newest(context, 0)
        selected = _select([(budget, is_ordered)], context, queries, cache, _norms(cache), device, width=700)
        promise = queries[0, 0, axes[context.slots[0, :592]]]
        _check_best(selected.selection, context, promise, wanted, is_ordered)


@pytest.mark.parametrize("spread", [0.0, 1e-4])
def test_scores_too_close_for_a_histogram_are_told_apart(spread: float, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    length, wanted = 4700, 300
    keys = torch.ones(SLOTS, 1, 64)
    keys[:, 0, 0] += spread * torch.randn(SLOTS, generator=generator)
    cache = LayerCache(keys, keys)
    context = scattered_context([length], SLOTS)
    queries = torch.zeros(1, 1, 64)
    queries[..., 0] = 1.0
    norms = _norms(cache)
    budget = wanted + _in_newest(context, 0)
    selected = _select([(budget, False)], context, queries, cache, norms, device, width=320)
    scored = context.slots[0, : length - _in_newest(context, 0)]
    assert len(scored) > MAX_CANDIDATES
    # The mean query is an axis, so that there is one product to round.
    promise = keys[scored, 0, 0] * norms.reciprocals[0][scored, 0]
    assert promise.unique().numel() > 100 * bool(spread)
    _check_best(selected.selection, context, promise, wanted, is_ordered=False)


def test_a_row_is_the_same_whatever_its_neighbours(device: torch.device) -> None:
    cache, context = random_cache(SLOTS, 2, 64), scattered_context([1100, 300, 90], SLOTS)
    queries, norms = random_queries(3, 8, 64), _norms(cache)
    parameters: list[Row | None] = [(150, False), (70, True), (30, False)]
    together = _select(parameters, context, queries, cache, norms, device, width=160).selection
    for row in range(3):
        own = _select([parameters[row]], context.rows([row]), queries[[row]], cache, norms, device, width=160).selection
        assert torch.equal(own.slots[0], together.slots[row])
        assert torch.equal(own.counts[0], together.counts[row])


def test_a_selection_that_has_no_room_is_the_whole_context(device: torch.device) -> None:
    cache, context = random_cache(SLOTS, 2, 64), scattered_context([200, 200], SLOTS)
    parameters: list[Row | None] = [(101, False), (100, False)]
    selected = _select(parameters, context, random_queries(2, 8, 64), cache, _norms(cache), device, width=100)
    check_whole(selected.selection, 0)
    assert (selected.selection.counts[1] == 100).all()
    assert selected.read[0] == 0
