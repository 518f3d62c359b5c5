"""Pages chosen in a check on the device, and what drafts attend to, against the torch reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.caches import SOFTMAXES, random_cache, random_queries, random_softmax, scattered_context
from tests.kernels.gpu.compiling import SHARED_LIMIT, SPARE_BYTES, compile_launches
from tests.kernels.gpu.conftest import INTERPRETED
from tests.kernels.gpu.selectors import cache_on
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.gpu_check import CheckPartial, PageSums, attend_new
from winnow_kernels.batch import DecodeBatch, DeviceSelection
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.policies.snapkv import gpu as stored_gpu
from winnow_kernels.policies.snapkv.gpu import StoredRows
from winnow_kernels.policies.verified_pages.gpu import BudgetRows, KeptPages, keep, weigh
from winnow_kernels.policies.verified_pages.parameters import VerifiedPages
from winnow_kernels.policies.verified_pages.reference import CheckedPages, PageBudget, VerifiedPagesStep

SCALE = 0.2
LAYERS, LAYER = 2, 1
LONGEST, EXAMPLES = (500, 5) if INTERPRETED else (20_000, 60)
SHAPES = [(64, 3, 5), (128, 4, 5), (128, 4, 17), (256, 4, 5)]
"""Head dim, query heads of a KV head, new tokens."""


@dataclass(frozen=True)
class Case:
    """Rows that check ``new_tokens``; where a row has no parameters it is another policy's.

    Where ``own_tokens`` are given, the row's others fill it up.
    """

    lengths: Sequence[int]
    parameters: Sequence[VerifiedPages | None]
    new_tokens: int
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    page_size: int = 16
    seed: int = 0
    softmax: str = "plain"
    own_tokens: Sequence[int] | None = None

    @property
    def own(self) -> Sequence[int]:
        """How many of the new tokens are a row's own."""
        return self.own_tokens or [self.new_tokens] * len(self.lengths)

    @property
    def context(self) -> Context:
        return scattered_context(self.lengths, self.pool, self.page_size, self.seed)

    @property
    def pool(self) -> int:
        return (sum(-(-length // self.page_size) for length in self.lengths) + 1) * self.page_size

    @property
    def cache(self) -> LayerCache:
        cache = random_cache(self.pool, self.kv_heads, self.head_dim, self.seed)
        return replace(cache, softmax=random_softmax(self.softmax, self.kv_heads * self.group))

    @property
    def queries(self) -> Tensor:
        rows = len(self.lengths) * self.new_tokens
        return random_queries(rows, self.kv_heads * self.group, self.head_dim, self.seed)


def batch_of(case: Case, device: torch.device) -> DecodeBatch:
    batch = DecodeBatch.empty(len(case.lengths), max(case.lengths) + 100, case.page_size, device)
    for row, length in enumerate(case.lengths):
        pages = case.context.slots[row, : length : case.page_size] // case.page_size
        batch.page_table[row, : len(pages)] = pages
    batch.lengths.copy_(case.context.lengths)
    return batch


def chosen(case: Case, device: torch.device) -> tuple[KeptPages, Tensor, DecodeBatch]:
    """What a check leaves, the rows' request slots, and the batch."""
    rows, heads = len(case.lengths), case.kv_heads * case.group
    batch = batch_of(case, device)
    cache = cache_on(device, case.cache)
    budgets = [None if own is None else PageBudget.of(own, case.page_size) for own in case.parameters]
    numbers = [(0, 0, 0) if own is None else (own.recent, own.most, own.sinks * case.page_size) for own in budgets]
    of_rows = BudgetRows(*torch.tensor(numbers, dtype=torch.int32, device=device).T.contiguous())
    room = max((own.sinks + own.most for own in budgets if own is not None), default=0) + 1
    request_slots = torch.arange(rows, 0, -1, device=device)
    shape = (rows + 1, LAYERS, case.kv_heads)
    kept = KeptPages(
        torch.full(((rows + 1) * LAYERS * case.kv_heads * room,), -7, dtype=torch.int32, device=device),
        (torch.arange((rows + 1) * LAYERS * case.kv_heads, device=device) * room).view(shape),
        torch.full(shape, -7, dtype=torch.int32, device=device),
        torch.full((rows + 1,), -7, dtype=torch.int32, device=device),
    )
    pages = batch.page_table.shape[1]
    tokens = rows * case.new_tokens
    sums, highest = torch.full((2, tokens, heads, pages), torch.nan, dtype=torch.float32, device=device)
    page_sums = PageSums(sums, highest, of_rows.recent, pages)
    partial = CheckPartial.empty(tokens, heads, cache)
    queries = case.queries.to(device)
    output = torch.empty_like(queries)
    own_tokens = torch.tensor(case.own, dtype=torch.int32, device=device)
    attend_new(queries, cache, batch, SCALE, partial, output, page_sums=page_sums, own_tokens=own_tokens)
    plain = torch.empty_like(queries)
    attend_new(queries, cache, batch, SCALE, partial, plain, own_tokens=own_tokens)
    assert torch.equal(output, plain)
    masses = torch.full((LAYERS, rows, case.kv_heads, pages), torch.nan, dtype=torch.float32, device=device)
    for of_layer in masses:
        weigh(case.new_tokens, batch, of_rows, page_sums, own_tokens, partial.totals, of_layer)
    keep(0, case.new_tokens, batch, of_rows, masses, request_slots, kept)
    return kept, request_slots, batch


def check(case: Case, device: torch.device) -> None:
    kept, request_slots, batch = chosen(case, device)
    context, cache, slots = case.context, case.cache, request_slots.tolist()
    states = []
    for row, (own, length) in enumerate(zip(case.parameters, case.lengths, strict=True)):
        if own is None:
            assert kept.kept[slots[row]].eq(-7).all()
            assert kept.since[slots[row]] == -7
            continue
        state = CheckedPages(own, case.page_size, LAYERS, case.kv_heads, length)
        first, missing = row * case.new_tokens, case.new_tokens - case.own[row]
        queries = case.queries[first : first + case.own[row]]
        for layer in range(LAYERS):
            state.observe(layer, queries, context.slots[row, : length - missing], cache, SCALE)
        states.append(state)
        assert kept.since[slots[row]] == state.since
        for head in range(case.kv_heads):
            offset, count = int(kept.offsets[slots[row], LAYER, head]), int(kept.kept[slots[row], LAYER, head])
            pages = kept.pages[offset : offset + count].cpu()
            assert (pages * case.page_size).tolist() == state.kept[LAYER][head, :: case.page_size].tolist()
    attended(case, kept, request_slots, batch, states)


def attended(
    case: Case, kept: KeptPages, request_slots: Tensor, batch: DecodeBatch, states: Sequence[CheckedPages]
) -> None:
    """Drafts attend to the same slots in the same order."""
    is_own = torch.tensor([own is not None for own in case.parameters], device=request_slots.device)
    rows = StoredRows(
        kept.pages,
        kept.offsets[request_slots].contiguous(),
        kept.kept[request_slots].contiguous(),
        kept.since[request_slots] * is_own,
    )
    selection = DeviceSelection.empty(batch.rows, case.kv_heads, batch.longest, request_slots.device)
    stored_gpu.select(LAYER, batch, rows, selection, case.page_size)
    own_rows = is_own.nonzero().flatten().tolist()
    if not own_rows:
        return
    context = case.context.rows(own_rows)
    step = VerifiedPagesStep(context, SCALE, None, states)
    expected = step.select(LAYER, case.queries[: len(own_rows)], case.cache, Meter(len(own_rows), context.device))
    for place, (row, state) in enumerate(zip(own_rows, states, strict=True)):
        for head in range(case.kv_heads):
            count = int(selection.counts[row, head])
            if state.since == 0:
                assert count == -1
                continue
            assert count == int(expected.counts[place, head])
            assert selection.slots[row, head, :count].tolist() == expected.slots[place, head, :count].tolist()


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "page_size", "new_tokens"),
    [(2, 4, 64, 16, 5), (1, 7, 96, 32, 2), (2, 3, 128, 64, 17), (3, 1, 64, 32, 1)],
)
def test_equals_the_reference(
    kv_heads: int, group: int, head_dim: int, page_size: int, new_tokens: int, device: torch.device
) -> None:
    own = VerifiedPages(budget=160, recency=32)
    parameters = [own, None, VerifiedPages(budget=80, recency=64, sinks=0), VerifiedPages(budget=400)]
    check(Case([410, 300, 330, 90], parameters, new_tokens, kv_heads, group, head_dim, page_size), device)


def test_tokens_that_fill_a_row_up_weigh_nothing(device: torch.device) -> None:
    parameters = [VerifiedPages(budget=160, recency=32), None, VerifiedPages(budget=80, recency=64, sinks=0)]
    parameters.append(VerifiedPages(budget=160, recency=32))
    check(Case([410, 300, 330, 400], parameters, 9, group=4, own_tokens=[9, 1, 1, 4]), device)


@pytest.mark.parametrize("softmax", SOFTMAXES[1:])
def test_masses_of_caps_and_sinks(softmax: str, device: torch.device) -> None:
    parameters = [VerifiedPages(budget=160, recency=32), None, VerifiedPages(budget=80, recency=64, sinks=0)]
    check(Case([410, 300, 330], parameters, 5, softmax=softmax), device)


@given(
    rows=st.lists(
        st.tuples(st.integers(20, LONGEST), st.integers(0, 40), st.integers(16, 100), st.integers(0, 200)),
        min_size=1,
        max_size=3,
    ),
    new_tokens=st.integers(1, 17),
    page_size=st.sampled_from([16, 32]),
    own_tokens=st.none() | st.lists(st.integers(1, 17), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=EXAMPLES)
def test_any_budgets(
    rows: list[tuple[int, int, int, int]],
    new_tokens: int,
    page_size: int,
    own_tokens: list[int] | None,
    seed: int,
    device: torch.device,
) -> None:
    own = own_tokens and [min(tokens, new_tokens) for tokens in own_tokens[: len(rows)]]
    parameters = [
        VerifiedPages(budget=sinks + recency + more, sinks=sinks, recency=recency) for _, sinks, recency, more in rows
    ]
    check(
        Case([row[0] for row in rows], parameters, new_tokens, page_size=page_size, seed=seed, own_tokens=own), device
    )


def _launch() -> None:
    """Attend and choose at each of ``SHAPES``, of bfloat16, with 8 KV heads and up to 128K tokens."""
    device = torch.device("cpu")
    batch = DecodeBatch.empty(2, 131_072, 16, device)
    pages = batch.page_table.shape[1]
    asking = BudgetRows(*torch.ones(3, 2, dtype=torch.int32))
    stored = torch.zeros(2, LAYERS, 8, dtype=torch.int64)
    kept = KeptPages(torch.zeros(64, dtype=torch.int32), stored, stored.int(), torch.zeros(2, dtype=torch.int32))
    for head_dim, group, new_tokens in SHAPES:
        cache = LayerCache(*torch.empty(2, 64, 8, head_dim, dtype=torch.bfloat16))
        queries = torch.empty(2 * new_tokens, 8 * group, head_dim, dtype=torch.bfloat16)
        partial = CheckPartial.empty(len(queries), 8 * group, cache)
        sums = PageSums(torch.empty(64), torch.empty(64), asking.recent, pages)
        own = torch.ones(2, dtype=torch.int32)
        attend_new(queries, cache, batch, 0.1, partial, torch.empty_like(queries), page_sums=sums, own_tokens=own)
        masses = torch.empty(1, 2, 8, pages)
        weigh(new_tokens, batch, asking, sums, own, partial.totals, masses[0])
        keep(LAYER, new_tokens, batch, asking, masses, torch.arange(2), kept)


def test_fits_a_multiprocessor() -> None:
    compiled = iter(compile_launches(_launch))
    for _, group, new_tokens in SHAPES:
        attending, _, weighing, keeping = (next(compiled) for _ in range(4))
        assert attending.shared_bytes <= SHARED_LIMIT // 2
        # What rows that ask need lies beside what all need.
        assert attending.local_bytes <= (512 if group * new_tokens > 64 else 2 * SPARE_BYTES)
        assert weighing.local_bytes == keeping.local_bytes == 0
