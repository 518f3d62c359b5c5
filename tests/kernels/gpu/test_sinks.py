"""Sinks in the selectors that score pages or tokens on a GPU, against the torch references."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.gpu.selectors import cache_on, check_equal, delta_rows, of_other_kinds, on_device, untouched
from tests.kernels.parameters import delta_parameters, quest_parameters, quoka_decode_parameters
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.gpu import AttendBuffers
from winnow_kernels.batch import DeviceSelection
from winnow_kernels.cache import Context
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.policies.delta import gpu as delta
from winnow_kernels.policies.delta.parameters import Role
from winnow_kernels.policies.delta.reference import DeltaStep
from winnow_kernels.policies.quest import gpu as quest
from winnow_kernels.policies.quest.reference import QuestStep
from winnow_kernels.policies.quoka import gpu as quoka
from winnow_kernels.policies.quoka.reference import QuokaStep
from winnow_kernels.selection.gpu_pages import PageBuffers
from winnow_kernels.selection.gpu_top import TopRows
from winnow_kernels.selection.pages import pages_kept, pages_of

SLOTS, KV_HEADS, GROUP, HEAD_DIM, WIDTH = 4096, 2, 2, 64, 512
CPU = torch.device("cpu")
# Shorter than the sinks, than sinks and budget, and longer; the last token of a page and the first of one.
LENGTHS = [3, 17, 45, 64, 65, 130, 500, 576]
BUDGETS = [32, 16, 100, 64, 90, 70, 130, 60]
CACHE = random_cache(SLOTS, KV_HEADS, HEAD_DIM)
QUERIES = 2 * random_queries(len(LENGTHS), KV_HEADS * GROUP, HEAD_DIM)

pytestmark = [
    pytest.mark.parametrize("sinks", [0, 4, 16, 40]),
    pytest.mark.parametrize("page_size", [16, 64]),
    pytest.mark.parametrize("is_ordered", [False, True]),
]


def _context(page_size: int) -> Context:
    return scattered_context(LENGTHS, SLOTS, page_size)


def _newest(length: int, page_size: int) -> int:
    return (length - 1) % page_size + 1


def _check_first(selection: DeviceSelection, context: Context, row: int, recent: int, sinks: int) -> None:
    """Sinks come behind the recent tokens, in the context's order; what is recent already is not there twice."""
    length = int(context.lengths[row])
    sinks = min(sinks, length - recent)
    own = selection.slots[row, :, recent : recent + sinks].cpu()
    assert (own == context.slots[row, :sinks]).all()
    counts = selection.counts[row].tolist()
    assert all(len(set(selection.slots[row, head, :count].tolist())) == count for head, count in enumerate(counts))


def test_quest(sinks: int, page_size: int, is_ordered: bool, device: torch.device) -> None:
    context = _context(page_size)
    bounds = PageBounds([CACHE], PageGenerations(SLOTS, page_size, CPU))
    bounds.ensure(torch.arange(SLOTS // page_size))
    batch = on_device(context, device, page_size=page_size)
    rows = of_other_kinds(quest.QuestRows, batch.rows, device)
    rows.budgets.copy_(torch.tensor([pages_kept(budget, 1, sinks, page_size) for budget in BUDGETS]))
    rows.sinks.fill_(sinks)
    rows.by_score.fill_(is_ordered)
    selection = untouched(batch, KV_HEADS, WIDTH)
    buffers = PageBuffers.empty(batch.rows, KV_HEADS, batch.page_table.shape[1], device)
    quest.select(0, QUERIES.to(device), bounds.bounds[0].to(device), batch, rows, selection, buffers)
    parameters = [quest_parameters(budget, 0, sinks) for budget in BUDGETS]
    expected = QuestStep(context, 1.0, None, parameters, bounds).select(0, QUERIES, CACHE, Meter(len(LENGTHS), CPU))
    for row, length in enumerate(LENGTHS):
        newest = _newest(length, page_size)
        check_equal(selection, row, expected, row, ordered=slice(None if is_ordered else newest))
        _check_first(selection, context, row, newest, sinks)


def test_delta(sinks: int, page_size: int, is_ordered: bool, device: torch.device) -> None:
    context, cache = _context(page_size), cache_on(device, CACHE)
    recent = 20
    batch = on_device(context, device, page_size=page_size)
    rows = delta_rows(batch.rows, 2, device)
    rows.roles[0], rows.roles[1] = Role.REFRESH, Role.REUSE
    rows.budgets.copy_(torch.tensor([pages_kept(max(budget, recent), recent, sinks, page_size) for budget in BUDGETS]))
    rows.recent.fill_(pages_of(recent, page_size))
    rows.sinks.fill_(sinks)
    rows.by_score.fill_(is_ordered)
    selection = untouched(batch, KV_HEADS, WIDTH)
    counts = selection.counts.repeat(2, 1, 1)
    delta.write_counts(batch, rows, counts, WIDTH)
    attend_buffers = AttendBuffers.empty(batch.rows, KV_HEADS * GROUP, cache)
    buffers = delta.DeltaBuffers.empty(batch, KV_HEADS * GROUP)
    queries = QUERIES.to(device)
    output = torch.empty_like(queries)
    delta.attend_and_score(0, queries, cache, batch, rows, 0.125, attend_buffers, buffers, output)
    delta.score_tokens(0, batch, rows, attend_buffers, buffers)
    delta.select(0, batch, rows, selection.slots, buffers)
    parameters = [delta_parameters(max(budget, recent), recent, 0, (0,), sinks) for budget in BUDGETS]
    step = DeltaStep(context, 0.125, None, parameters, page_size)
    step.attend(0, QUERIES, CACHE, Meter(len(LENGTHS), CPU))
    expected = step.select(1, QUERIES, CACHE, Meter(len(LENGTHS), CPU))
    selected = DeviceSelection(selection.slots, counts[1])
    for row, length in enumerate(LENGTHS):
        kept = min(length, _newest(length, page_size) + (pages_of(recent, page_size) - 1) * page_size)
        check_equal(selected, row, expected, row, ordered=slice(None if is_ordered else kept))
        _check_first(selected, context, row, kept, sinks)


def test_quoka(sinks: int, page_size: int, is_ordered: bool, device: torch.device) -> None:
    context = _context(page_size)
    index = KeyCodes([cache_on(device, CACHE)], PageGenerations(SLOTS, page_size, device))
    index.ensure(torch.arange(SLOTS // page_size, device=device))
    batch = on_device(context, device, page_size=page_size)
    parameters = [quoka_decode_parameters(budget=budget, sinks=sinks) for budget in BUDGETS]
    rows = of_other_kinds(TopRows, batch.rows, device)
    rows.budgets.copy_(torch.tensor([own.tokens(length - 1) for own, length in zip(parameters, LENGTHS, strict=True)]))
    rows.sinks.fill_(sinks)
    rows.by_score.fill_(is_ordered)
    selection = untouched(batch, KV_HEADS, WIDTH)
    scratch = quoka.Scratch.empty(batch.rows, KV_HEADS, HEAD_DIM, batch.longest, WIDTH, device)
    queries, [cache] = QUERIES.to(device), index.caches
    quoka.select(0, queries, cache, index, batch, rows, selection, scratch, any_by_score=is_ordered)
    on_it = Context(context.slots.to(device), context.lengths.to(device))
    step = QuokaStep(on_it, 1.0, None, parameters, index)
    expected = step.select(0, queries, cache, Meter(len(LENGTHS), device))
    for row, length in enumerate(LENGTHS):
        newest = _newest(length, page_size)
        always = newest + min(sinks, length - newest)
        check_equal(selection, row, expected, row, ordered=slice(always, None) if is_ordered else slice(0))
        _check_first(selection, context, row, newest, sinks)
