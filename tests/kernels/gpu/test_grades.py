"""Selecting the tokens with the highest grades, in Triton: what a stable sort selects."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.caches import scattered_context
from tests.kernels.gpu.conftest import INTERPRETED
from tests.kernels.gpu.selectors import check_untouched, of_other_kinds, on_device, untouched
from winnow_kernels.batch import Count
from winnow_kernels.selection import gpu_grades
from winnow_kernels.selection.gpu_grades import GRADES, SAMPLE_GRADES, SAMPLED, GradeBuffers, select_by_grade
from winnow_kernels.selection.gpu_top import TopRows

KV_HEADS, PAGE = 2, 16
# So small that a context has several parts, and a part several tiles.
TILE = 64 if INTERPRETED else 4096
FACTOR = TILE // 64


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_grades, "_TILE", TILE)


def sample_of(grades: Tensor, sinks: int) -> Tensor:
    """What scoring counts of grades, int [KV heads, tokens]."""
    place = torch.arange(grades.shape[1], device=grades.device)
    sampled = grades[:, (place % SAMPLED == 0) & (place >= sinks)].long() // SAMPLE_GRADES
    counts = torch.zeros(len(grades), GRADES // SAMPLE_GRADES, dtype=torch.int32, device=grades.device)
    return counts.scatter_add_(1, sampled, torch.ones_like(sampled, dtype=torch.int32))


def check(lengths: list[int], rows: TopRows, spread: int, seed: int, device: torch.device) -> GradeBuffers:
    """Select of random grades, ``spread`` wide, and compare."""
    slots = sum(-(-length // PAGE) for length in lengths) * PAGE + PAGE
    context = scattered_context(lengths, slots, PAGE, seed)
    batch = on_device(context, device)
    width = max(lengths)
    selection = untouched(batch, KV_HEADS, width)
    buffers = GradeBuffers.empty(len(lengths), KV_HEADS, batch.longest, width, device)
    generator = torch.Generator().manual_seed(seed)
    drawn = (1000 + spread * torch.randn(buffers.grades.shape, generator=generator)).floor().clamp(0, GRADES - 1)
    buffers.grades.copy_(drawn)
    scored = [(length - 1) // PAGE * PAGE for length in lengths]
    for row, earlier in enumerate(scored):
        buffers.samples[row] = sample_of(buffers.grades[row, :, :earlier], int(rows.sinks[row]))
    select_by_grade(batch, rows, selection, buffers, 38.25, any_by_score=bool(rows.by_score.any()))
    for row, (length, earlier, budget) in enumerate(zip(lengths, scored, rows.budgets.tolist(), strict=True)):
        if budget == 0:
            check_untouched(selection, row)
            continue
        sinks = min(int(rows.sinks[row]), earlier)
        always = length - earlier + sinks
        wanted = max(0, min(length, budget) - always)
        first = torch.cat((torch.arange(earlier, length), torch.arange(sinks)))
        assert int(batch.counts[row, Count.READ_BYTES]) == KV_HEADS * earlier * 38.25
        for head in range(KV_HEADS):
            own = buffers.grades[row, head, sinks:earlier].cpu().int()
            best = sinks + own.sort(descending=True, stable=True).indices[:wanted]
            if not rows.by_score[row]:
                best = best.sort().values
            assert int(selection.counts[row, head]) == always + wanted
            expected = context.slots[row, torch.cat((first, best))]
            assert torch.equal(selection.slots[row, head, : always + wanted].cpu().long(), expected)
    return buffers


@settings(max_examples=15 if INTERPRETED else 100)
@given(data=st.data())
def test_a_selection_is_that_of_a_stable_sort(device: torch.device, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(1, 1500 * FACTOR), min_size=count, max_size=count))
    rows = of_other_kinds(TopRows, count, device)
    for row, length in enumerate(lengths):
        rows.budgets[row] = data.draw(st.integers(0, length + 20))
        rows.sinks[row] = data.draw(st.sampled_from([0, 4, 16, 100]))
        # Sorting compares each with each.
        rows.by_score[row] = data.draw(st.booleans()) and length < 2000
    check(lengths, rows, data.draw(st.sampled_from([0, 1, 30, 300])), data.draw(st.integers(0, 99)), device)


def test_some_more_are_listed_than_are_taken(device: torch.device) -> None:
    length, budget = 1500 * FACTOR, 320 * FACTOR
    rows = of_other_kinds(TopRows, 1, device)
    rows.budgets.fill_(budget)
    buffers = check([length], rows, 100, 1, device)
    listed = buffers.counts.sum(-1)
    assert (listed >= budget).all()
    assert (listed < length - 1).all()
    assert torch.equal(buffers.histograms.sum(-1), listed)
    if not INTERPRETED:
        assert (listed < 1.3 * budget).all()
