"""QUOKA's selector in decode on a GPU against the torch reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.gpu.conftest import INTERPRETED
from tests.kernels.gpu.selectors import (
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
from winnow_kernels.indexes.key_codes import KeyCodes, RoundedQueries
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.policies.quoka import gpu as quoka
from winnow_kernels.policies.quoka.reference import QuokaStep
from winnow_kernels.selection.gpu_top import TopRows

# The interpreter multiplies no half precision.
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
# On a GPU more than what one program scores, lists and takes.
FACTOR = 1 if INTERPRETED else 60
# Groups, head dims, bits and page sizes, each value once at least.
SHAPES = [
    (2, 4, 64, 2, 16),
    (1, 5, 128, 2, 64),
    (1, 1, 96, 3, 32),
    (1, 3, 80, 4, 16),
    (1, 2, 256, 2, 16),
    (2, 16, 64, 3, 16),
]


@dataclass(frozen=True)
class Asked:
    """What a row asks for, and whether early termination makes the order of its selection matter."""

    budget: int
    ordered: bool = False
    sinks: int = 0


@dataclass(frozen=True)
class Case:
    """Rows in a layer; None asks for nothing of this kind."""

    cache: LayerCache
    context: Context
    index: KeyCodes
    queries: Tensor
    asked: Sequence[Asked | None]

    @classmethod
    def of(
        cls,
        device: torch.device,
        lengths: Sequence[int],
        asked: Sequence[Asked | None],
        kv_heads: int = 2,
        group: int = 4,
        head_dim: int = 64,
        bits: int = 2,
        page_size: int = 16,
    ) -> Case:
        slots = (sum(-(-length // page_size) for length in lengths) + 1) * page_size
        queries = random_queries(len(lengths), kv_heads * group, head_dim, 1)
        cache, context = random_cache(slots, kv_heads, head_dim, 0, DTYPE), scattered_context(lengths, slots, page_size)
        return cls.with_keys(device, cache, context, queries, asked, bits, page_size)

    @classmethod
    def with_keys(
        cls,
        device: torch.device,
        cache: LayerCache,
        context: Context,
        queries: Tensor,
        asked: Sequence[Asked | None],
        bits: int = 2,
        page_size: int = 16,
    ) -> Case:
        own = cache_on(device, cache)
        index = KeyCodes([own], PageGenerations(own.slots, page_size, device), bits=bits)
        index.ensure(torch.arange(own.slots // page_size, device=device))
        on_it = Context(context.slots.to(device), context.lengths.to(device))
        return cls(own, on_it, index, queries.to(device, DTYPE), asked)

    def row(self, row: int) -> Case:
        """Return one of the rows alone."""
        return Case(self.cache, self.context.rows([row]), self.index, self.queries[[row]], [self.asked[row]])

    @property
    def page_size(self) -> int:
        return self.index.generations.page_size

    def reference(self, row: int) -> QuokaStep:
        asked = self.asked[row]
        assert asked is not None
        parameters = quoka_decode_parameters(budget=asked.budget, sinks=asked.sinks)
        return QuokaStep(self.context.rows([row]), 1.0, None, [parameters], self.index)


@dataclass(frozen=True)
class Selected:
    """What the kernels wrote, the bytes that they counted for each row, and their scratch."""

    selection: DeviceSelection
    read: list[int]
    scratch: quoka.Scratch


def select(case: Case, width: int | None = None, scratch: quoka.Scratch | None = None) -> Selected:
    device = case.queries.device
    batch = on_device(case.context, device, page_size=case.page_size)
    rows = of_other_kinds(TopRows, batch.rows, device)
    for row, own in enumerate(case.asked):
        if own is not None:
            rows.budgets[row], rows.sinks[row], rows.by_score[row] = own.budget, own.sinks, own.ordered
    selection = untouched(batch, case.cache.kv_heads, width or batch.longest)
    sizes = (case.cache.kv_heads, case.cache.head_dim, batch.longest, selection.slots.shape[2])
    scratch = scratch or quoka.Scratch.empty(batch.rows, *sizes, device)
    any_by_score = any(own is not None and own.ordered for own in case.asked)
    quoka.select(0, case.queries, case.cache, case.index, batch, rows, selection, scratch, any_by_score=any_by_score)
    assert batch.counts.sum() == batch.counts[:, Count.READ_BYTES].sum()
    return Selected(selection, batch.counts[:, Count.READ_BYTES].tolist(), scratch)


def check(case: Case, got: Selected) -> None:
    """Compare all rows with the reference's."""
    for row, own in enumerate(case.asked):
        if own is None:
            check_untouched(got.selection, row)
            assert got.read[row] == 0
            continue
        meter = Meter(1, case.queries.device)
        expected = case.reference(row).select(0, case.queries[[row]], case.cache, meter)
        length = int(case.context.lengths[row])
        newest = (length - 1) % case.page_size + 1
        always = newest + min(own.sinks, length - newest)
        check_equal(got.selection, row, expected, ordered=slice(always, None) if own.ordered else slice(0))
        slots = got.selection.slots[row]
        assert (slots[:, :newest] == case.context.slots[row, length - newest : length]).all()
        assert (slots[:, newest:always] == case.context.slots[row, : always - newest]).all()
        assert got.read[row] == int(meter.read_bytes)
        if not own.ordered:
            check_in_the_contexts_order(case, got.selection, row, always)


def check_in_the_contexts_order(case: Case, selection: DeviceSelection, row: int, always: int) -> None:
    positions = torch.empty(case.cache.slots, dtype=torch.int64, device=case.queries.device)
    length = int(case.context.lengths[row])
    positions[case.context.slots[row, :length]] = torch.arange(length, device=positions.device)
    for head, count in enumerate(selection.counts[row].tolist()):
        assert (positions[selection.slots[row, head, always:count].long()].diff() > 0).all()


@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "bits", "page_size"), SHAPES)
def test_rows_of_every_shape_are_the_references(
    kv_heads: int, group: int, head_dim: int, bits: int, page_size: int, device: torch.device
) -> None:
    lengths = [1100 * FACTOR, 1, 17, 330 * FACTOR, 190, 48, 700 * FACTOR + 1, 300]
    asked = [
        Asked(150 * FACTOR, ordered=True),
        Asked(3, sinks=16),
        Asked(200, ordered=True),
        None,
        Asked(4),
        Asked(47, ordered=True, sinks=4),
        Asked(699 * FACTOR, sinks=20),
        Asked(100, sinks=16),
    ]
    case = Case.of(device, lengths, asked, kv_heads, group, head_dim, bits, page_size)
    check(case, select(case))


def test_queries_are_rounded_as_the_references(device: torch.device) -> None:
    case = Case.of(device, [90, 40, 300], [Asked(50), Asked(20), Asked(60)], head_dim=128)
    scratch = select(case).scratch.queries
    grouped = case.queries.float().unflatten(1, (case.cache.kv_heads, -1))
    means = torch.nn.functional.normalize(grouped, dim=-1).mean(2)
    levels = RoundedQueries.of(means, 1.0).levels
    # In the middle between two levels either is right.
    off = (scratch.levels.int() - levels.int()).abs()
    assert off.max() <= 1
    assert off.sum() <= 1
    assert torch.equal(scratch.sums, scratch.levels.sum(-1, dtype=torch.int32))
    scales = 1024 / (levels.double().norm(dim=-1) * 128**0.5)
    torch.testing.assert_close(scratch.scales.double(), scales, rtol=1e-5, atol=0)


@pytest.mark.parametrize("ordered", [False, True])
def test_of_equal_cosines_the_first_are_taken(ordered: bool, device: torch.device) -> None:
    lengths = [400 * FACTOR, 500 * FACTOR]
    slots = 1000 * FACTOR
    cache = random_cache(slots, 1, 64, dtype=DTYPE)
    # All pages alike.
    keys = cache.keys[:16].repeat(-(-slots // 16), 1, 1)[:slots]
    queries = random_queries(2, 4, 64, seed=1)
    # All tokens of the second row alike.
    queries[1] = 0
    asked = [Asked(200 * FACTOR, ordered), Asked(150 * FACTOR, ordered)]
    own = LayerCache(keys, cache.values)
    case = Case.with_keys(device, own, scattered_context(lengths, slots), queries, asked)
    got = select(case)
    check(case, got)
    newest = (lengths[1] - 1) % 16 + 1
    first = case.context.slots[1, : 150 * FACTOR - newest]
    assert torch.equal(got.selection.slots[1, 0, newest : 150 * FACTOR].long(), first)


@pytest.mark.parametrize("best", [0, 5])
def test_a_sample_that_is_wrong_changes_nothing(best: int, device: torch.device) -> None:
    """The best tokens are all of the sample, or none of it is among them."""
    length = 640 * FACTOR
    context = scattered_context([length], length + 16)
    cache, queries = random_cache(length + 16, 1, 64, dtype=DTYPE), random_queries(1, 1, 64, seed=1)
    chosen = context.slots[0, best::16]
    cache.keys[chosen, 0] += (0.5 * queries[0]).to(DTYPE)
    case = Case.with_keys(device, cache, context, queries, [Asked(120 * FACTOR + 16)])
    got = select(case)
    listed = int(got.scratch.grades.counts.sum())
    if best == 0:
        assert listed < 120 * FACTOR
    else:
        assert listed > 140 * FACTOR
    check(case, got)


def test_a_row_is_the_same_whatever_its_neighbours_and_what_was_there(device: torch.device) -> None:
    case = Case.of(device, [1100, 300, 90], [Asked(150), Asked(70, ordered=True), Asked(30)])
    together = select(case, width=160)
    again = select(case, width=160, scratch=together.scratch)
    for row in range(3):
        alone = select(case.row(row), width=160).selection
        for other in (together.selection, again.selection):
            assert torch.equal(alone.slots[0], other.slots[row])
            assert torch.equal(alone.counts[0], other.counts[row])


def test_a_selection_that_has_no_room_is_the_whole_context(device: torch.device) -> None:
    case = Case.of(device, [200, 200], [Asked(101), Asked(100)])
    got = select(case, width=100)
    check_whole(got.selection, 0)
    assert (got.selection.counts[1] == 100).all()
    assert got.read[0] == 0
