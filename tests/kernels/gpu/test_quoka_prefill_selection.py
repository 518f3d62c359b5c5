"""QUOKA's selection in prefill on a GPU against the torch reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.gpu.compiling import SHARED_LIMIT, compile_launches
from tests.kernels.gpu.selectors import HALF, UNTOUCHED, cache_on
from tests.kernels.parameters import quoka_prefill_parameters
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.policies.quoka.parameters import QuokaPrefill
from winnow_kernels.policies.quoka.prefill import top
from winnow_kernels.policies.quoka.prefill.cut import blocks_of, dense_blocks_of
from winnow_kernels.policies.quoka.prefill.selection import QuokaPrefillPass, QuokaPrefillWorkspace, select_blocks
from winnow_kernels.policies.quoka.reference import select_for_blocks, speaking_queries
from winnow_kernels.prefill.blocks import WHOLE, Block, PrefillBlocks

# Scores are cosines; float32 sums of some hundred products are this exact.
ROUNDING: Final = 3e-6
# Head dims, representatives and queries of a block, and how many programs that rank and that score should fit.
SHAPES: Final = (
    (128, 8, 128, 4, 3),
    (128, 16, 128, 4, 3),
    (128, 64, 512, 4, 3),
    (128, 256, 512, 4, 2),
    (64, 16, 128, 4, 3),
    (256, 16, 128, 2, 2),
)
# The same of the kernels that search, in the order of their launches.
SEARCHING: Final = {"bracket": 4, "list": 6, "narrow": 1, "threshold": 4, "count": 16, "write": 5}
ALWAYS: Final = 2.0
"""In place of the score of a token that is always selected: more than any cosine."""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search little at a time: the interpreter is slow, and these contexts are short."""
    monkeypatch.setattr(top, "LISTED", 1024)
    monkeypatch.setattr(top, "SCORES_AT_ONCE", 512)


@dataclass(frozen=True)
class Pass:
    """A pass's queries and blocks, and the contexts that they lie in."""

    queries: Tensor
    blocks: Sequence[Block]
    context: Context
    cache: LayerCache
    page_size: int = 16

    def select(self, device: torch.device, scores_bytes: int = 2**22) -> Tensor:
        """Slots, int32 [blocks, KV heads, width]; of what is not written ``UNTOUCHED``."""
        return self.launch(device, scores_bytes).selection.slots.cpu()

    def launch(self, device: torch.device, scores_bytes: int = 2**22) -> QuokaPrefillPass:
        table = (self.context.slots[:, :: self.page_size] // self.page_size).to(device, torch.int32)
        blocks = PrefillBlocks.of(self.blocks, table, self.page_size)
        cache = cache_on(device, self.cache)
        workspace = QuokaPrefillWorkspace.empty(cache.kv_heads, self.context.longest, device, scores_bytes)
        workspace.scores.fill_(torch.nan)
        own = QuokaPrefillPass.of(blocks, cache, workspace)
        own.selection.slots.fill_(UNTOUCHED)
        # Strided, as it is when queries, keys and values come from one product.
        queries = torch.cat((self.queries, self.queries), -1).to(device)[..., : self.queries.shape[2]]
        assert select_blocks(queries, cache, own) is own.selection
        return own

    def representatives(self, block: Block) -> Tensor:
        """The reference's, [KV heads, representatives, head dim]."""
        rows = slice(block.first_query, block.first_query + block.queries)
        return speaking_queries(self.queries[rows], self.cache.kv_heads, block.representatives)

    def scores(self, block: Block, representatives: Tensor) -> Tensor:
        """Float64 [KV heads, tokens before the block]."""
        keys = self.cache.keys[self.context.slots[block.row, : block.start]].double()
        scores = torch.einsum("hsd,thd->hst", representatives.double(), keys).amax(1) / keys.norm(dim=-1).T
        scores[:, : block.sinks] = ALWAYS
        scores[:, block.start - block.recent :] = ALWAYS
        return scores

    def positions(self, block: Block, slots: Tensor) -> Tensor:
        """Positions of ``slots``, any shape, in the block's request."""
        positions = torch.full((self.cache.slots + 1,), -1)
        own = self.context.slots[block.row]
        positions[own] = torch.arange(len(own))
        return positions[slots.long()]


def random_pass(
    requests: Sequence[tuple[int, int, QuokaPrefill | None]],
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    page_size: int = 16,
) -> Pass:
    """Requests are given as tokens before the pass, tokens with those of the pass, and parameters, None if dense."""
    blocks: list[Block] = []
    first_query = 0
    for row, (prefix, length, parameters) in enumerate(requests):
        if parameters is None:
            blocks += dense_blocks_of(row, first_query, prefix, length)
        else:
            blocks += blocks_of(row, first_query, prefix, length, parameters)
        first_query += length - prefix
    lengths = [length for _, length, _ in requests]
    slots = (sum(-(-length // page_size) for length in lengths) + 3) * page_size
    cache = random_cache(slots, kv_heads, head_dim, dtype=dtype)
    # As in a model, keys and queries are not of equal length, and queries of a block resemble each other.
    cache.keys.mul_(torch.rand(slots, kv_heads, 1, generator=torch.Generator().manual_seed(1)) + 0.5)
    queries = (random_queries(first_query, kv_heads * group, head_dim) + 0.3).to(dtype)
    return Pass(queries, blocks, scattered_context(lengths, slots, page_size), cache, page_size)


def check_selected(own: Pass, launched: QuokaPrefillPass) -> int:
    """Compare representatives with the reference's, and what they select with scores in float64; returns the sparse
    blocks.

    Representatives may be rounded the other way, which changes scores by more than all else: they are compared by
    themselves.
    """
    selected = launched.selection.slots.cpu()
    representatives = {
        int(row[0]): vectors
        for run, of_run in zip(launched.plan.runs, launched.representatives, strict=True)
        for row, vectors in zip(run.sparse.cpu(), of_run.cpu(), strict=True)
    }
    for number, block in enumerate(own.blocks):
        if block.budget == WHOLE:
            assert (selected[number] == UNTOUCHED).all()
            assert number not in representatives
            continue
        expected = own.representatives(block)
        # In place of those that are not there the first is repeated, which changes no maximum.
        repeated = expected[:, :1].expand(-1, representatives[number].shape[1] - expected.shape[1], -1)
        step = torch.finfo(expected.dtype).eps
        torch.testing.assert_close(
            representatives[number], torch.cat((expected, repeated), 1), atol=4e-7, rtol=1.01 * step
        )
        assert (selected[number, :, block.budget :] == UNTOUCHED).all()
        positions = own.positions(block, selected[number, :, : block.budget])
        assert (positions >= 0).all()
        assert (positions[:, 1:] > positions[:, :-1]).all()
        scores = own.scores(block, representatives[number])
        least = scores.topk(block.budget, dim=-1).values[:, -1:]
        is_selected = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, positions, True)
        assert (is_selected | (scores < least + ROUNDING)).all()
        assert (~is_selected | (scores > least - ROUNDING)).all()
    return len(representatives)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "dtype", "page_size"),
    [(2, 4, 128, HALF, 16), (1, 5, 96, torch.float32, 1), (2, 1, 64, HALF, 64), (1, 2, 256, torch.float16, 16)],
)
def test_blocks_select_what_scores_most(
    kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, page_size: int, device: torch.device
) -> None:
    requests = [
        (0, 300, quoka_prefill_parameters(budget=40, block=64)),
        # Cut at both ends; a block has fewer queries than may speak.
        (250, 389, quoka_prefill_parameters(budget_ratio=0.2, block=128, queries=16)),
        (70, 200, None),
        (190, 333, quoka_prefill_parameters(budget=100, block=64, queries=3, dense_prefix=220)),
        (64, 160, quoka_prefill_parameters(budget=1, block=32, queries=100)),
        (100, 260, quoka_prefill_parameters(budget=40, block=64, sinks=5, recency_ratio=0.5)),
        # Nothing is left to choose.
        (130, 192, quoka_prefill_parameters(budget_ratio=0.2, block=64, sinks=7, recency_ratio=1.0)),
    ]
    own = random_pass(requests, kv_heads, group, head_dim, dtype, page_size)
    assert check_selected(own, own.launch(device)) == 17


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("always", [{}, {"sinks": 16}, {"sinks": 3, "recency_ratio": 0.6}])
def test_the_sets_are_the_references(always: dict[str, Any], device: torch.device) -> None:
    parameters = quoka_prefill_parameters(budget=50, block=64, queries=8, **always)
    own = random_pass([(130, 500, parameters)], 2, 4, 64)
    selected = own.select(device)
    expected = dict(select_for_blocks(own.queries, own.context.slots[0], own.cache, parameters))
    assert sorted(expected) == [block.start for block in own.blocks]
    for number, block in enumerate(own.blocks):
        positions = own.positions(block, selected[number, :, : block.budget])
        assert torch.equal(positions, expected[block.start].sort().values)


@pytest.mark.usefixtures("small_blocks")
def test_more_representatives_than_one_product_takes(device: torch.device) -> None:
    own = random_pass([(0, 500, quoka_prefill_parameters(budget=60, block=320, queries=300))], 1, 2, 64)
    assert check_selected(own, own.launch(device)) == 1


@pytest.mark.usefixtures("small_blocks")
def test_neighbours_batches_and_ends_of_chunks_change_nothing(device: torch.device) -> None:
    parameters = quoka_prefill_parameters(budget=70, block=64)
    others = [(40, 140, quoka_prefill_parameters(budget=30, block=64, queries=5)), (0, 90, None)]
    together = random_pass([(0, 600, parameters), *others], 1, 2, 64, HALF)
    expected = together.select(device)
    # One block, or a few, at a time.
    for scores_bytes in (1, 8_000):
        assert torch.equal(together.select(device, scores_bytes), expected)
    for number in (2, 9, 11):
        block = together.blocks[number]
        alone = replace(together, blocks=[block]).select(device)
        assert torch.equal(alone[0], expected[number, :, : alone.shape[2]])
    for begin, end in pairwise([0, 192, 448, 600]):
        blocks = [replace(b, first_query=b.first_query - begin) for b in blocks_of(0, begin, begin, end, parameters)]
        chunk = replace(together, queries=together.queries[begin:end], blocks=blocks).select(device)
        first = begin // 64
        assert torch.equal(chunk, expected[first : first + len(blocks), :, : chunk.shape[2]])


@pytest.mark.usefixtures("small_blocks")
def test_how_a_pass_is_cut_compiles_nothing_anew(device: torch.device) -> None:
    """Triton tells pointers and numbers that are multiples of 16 from others."""
    own = random_pass([(0, 600, quoka_prefill_parameters(budget=70, block=64))], 1, 2, 64, HALF).launch(device, 8_000)
    [run] = own.plan.runs
    assert len(run.batches) > 1
    for batch in run.batches:
        assert batch.sparse.data_ptr() % 16 == 0
        assert batch.groups.data_ptr() % 16 == 0
    assert own.selection.slots.shape[2] % 16 == 0


def test_a_pass_without_sparse_blocks_launches_nothing(device: torch.device) -> None:
    own = random_pass([(0, 200, None), (10, 100, quoka_prefill_parameters(budget=100, block=64))], 1, 2, 64)
    assert own.select(device).shape == (len(own.blocks), 1, 0)


def _pass_of_levels(levels: Tensor, budgets: Sequence[int]) -> Pass:
    """A pass of requests with ``levels``, int64 [requests, tokens], that grow with the keys' scores."""
    requests, tokens = levels.shape
    slots = requests * (tokens + 16) + 64
    context = scattered_context([tokens + 8] * requests, slots)
    keys = torch.zeros(slots, 1, 64)
    cosines = levels * 1e-4
    keys[context.slots[:, :tokens].flatten(), 0, 0] = cosines.flatten()
    keys[context.slots[:, :tokens].flatten(), 0, 1] = (1 - cosines**2).sqrt().flatten()
    queries = torch.zeros(8, 1, 64)
    queries[..., 0] = 2.0
    blocks = [Block(row, tokens, tokens, tokens + 8, 0, budget, 8) for row in range(requests) for budget in budgets]
    return Pass(queries, blocks, context, LayerCache(keys, keys))


def _check_levels(own: Pass, levels: Tensor, selected: Tensor) -> None:
    for number, block in enumerate(own.blocks):
        best = levels[block.row].sort(descending=True, stable=True).indices[: block.budget].sort().values
        assert torch.equal(own.positions(block, selected[number, 0, : block.budget]), best), block


def _levels(tokens: int, listed: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    scattered = torch.randint(0, 9000, (tokens,), generator=generator)
    place = torch.arange(tokens)
    sampled = place % (tokens // (listed // 8)) < 8
    return torch.stack(
        [
            scattered,
            # All scores alike, or nearly all.
            torch.full((tokens,), 3000),
            torch.where(place % 3 == 0, 3000, 3001),
            torch.where(place % 100 == 7, scattered, 10),
            # Samples that mislead.
            torch.where(sampled, scattered % 100, 1000 + scattered // 2),
            torch.where(sampled, 5000 + scattered // 3, scattered % 3000),
            place,
        ]
    )


def test_thresholds_are_exact_whatever_the_scores(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(top, "LISTED", 256)
    monkeypatch.setattr(top, "SCORES_AT_ONCE", 512)
    monkeypatch.setattr(top, "COUNTS_AT_ONCE", 1)
    levels = _levels(1040, 256)
    own = _pass_of_levels(levels, [1, 150, 1039])
    _check_levels(own, levels, own.select(device))


@pytest.mark.parametrize("tokens", [top.LISTED - 64, top.LISTED + 900])
def test_long_contexts(tokens: int, device: torch.device) -> None:
    levels = _levels(tokens, top.LISTED)[[0, 5]]
    own = _pass_of_levels(levels, [1000])
    _check_levels(own, levels, own.select(device, 2**20))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_not_finite_stays_in_its_block(device: torch.device) -> None:
    own = random_pass([(0, 500, quoka_prefill_parameters(budget=40, block=64, queries=8))], 1, 2, 64)
    expected = own.select(device)
    broken = 3
    own.queries[own.blocks[broken].first_query + 5] = torch.nan
    own.cache.keys[own.context.slots[0, 440]] = torch.inf
    selected = own.select(device)
    assert (own.positions(own.blocks[broken], selected[broken, :, :40]).diff() > 0).all()
    assert torch.equal(selected[1:broken], expected[1:broken])
    assert torch.equal(selected[broken + 1 : 7], expected[broken + 1 : 7])
    assert (own.positions(own.blocks[7], selected[7, :, :40]).diff() > 0).all()


def _launch() -> None:
    """Select at each of ``SHAPES`` for one block behind 16,384 tokens, with 8 KV heads."""
    table = torch.zeros(1, 2048, dtype=torch.int32)
    for head_dim, representatives, queries, _, _ in SHAPES:
        block = Block(0, 16_384, 16_384, 16_384 + queries, 0, 1024, representatives)
        blocks = PrefillBlocks.of([block], table, 16)
        cache = LayerCache(*torch.empty(2, 64, 8, head_dim, dtype=torch.bfloat16))
        own = QuokaPrefillPass.of(blocks, cache, QuokaPrefillWorkspace.empty(8, 16_384, table.device, 2**22))
        select_blocks(torch.empty(queries, 32, head_dim, dtype=torch.bfloat16), cache, own)


def test_kernels_fit_a_multiprocessor_as_often_as_they_should() -> None:
    launched = iter(compile_launches(_launch))
    for head_dim, _, _, ranking, scoring in SHAPES:
        averaging = 8 if head_dim < 256 else 5
        programs = {"norms": 8, "rank": ranking, "average": averaging, "score": scoring} | SEARCHING
        for (kernel, fitting), compiled in zip(programs.items(), launched, strict=False):
            assert compiled.kernel.endswith(f":{kernel}_kernel")
            assert compiled.local_bytes == 0, compiled
            assert fitting * (compiled.shared_bytes + 1024) <= SHARED_LIMIT + 1024, compiled
            assert fitting * compiled.warps * 32 * compiled.registers <= 65536, compiled
            if kernel == "score":
                assert "wgmma" in compiled.ptx, compiled
    assert next(launched, None) is None
