"""DELTA against Algorithms 1 and 2 in plain float64: roles of layers, pages, output, counts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.attention_float64 import scores_of_head
from tests.kernels.caches import SOFTMAXES, random_cache, random_queries, random_softmax, scattered_context
from tests.kernels.parameters import delta_parameters, termination_at
from tests.kernels.selected_tokens import dense_output, output_over, positions_of
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.policies.delta.parameters import Delta
from winnow_kernels.policies.delta.reference import DeltaStep

SLOTS, DIM = 2400, 32
SCALE = DIM**-0.5
CPU = torch.device("cpu")


def _token_scores(queries: Tensor, slots: Tensor, cache: LayerCache) -> list[float]:
    """The greatest weight of each token over the query heads, [query heads, head dim]."""
    group = len(queries) // cache.kv_heads
    scores = [0.0] * len(slots)
    for query_head, query in enumerate(queries.double()):
        keys = cache.keys[slots, query_head // group]
        weights = scores_of_head(query[None], keys, SCALE, cache.softmax.cap)[0].softmax(0)
        scores = [max(score, float(weight)) for score, weight in zip(scores, weights, strict=True)]
    return scores


def _refresh(queries: Tensor, slots: Tensor, cache: LayerCache, p: Delta, page_size: int) -> list[int]:
    """Algorithm 2; returns positions in the order in which they are read."""
    length = len(slots)
    scores = _token_scores(queries, slots, cache)
    pages = [list(range(first, min(first + page_size, length))) for first in range(0, length, page_size)]
    most, recent = math.ceil(p.budget / page_size), math.ceil(p.recency / page_size)
    kept = pages[::-1][:recent]
    sinks = pages[: -len(kept)][: math.ceil(p.sinks / page_size)]
    older = sorted(pages[len(sinks) : -len(kept)], key=lambda page: -math.fsum(scores[t] for t in page))
    newest, *others = kept + sinks + older[: max(0, most - len(kept) - len(sinks))]
    return newest[::-1] + [token for page in others for token in page]


class _PlainStep:
    """Algorithm 1 for one request: what each layer reads, and whether it reads everything."""

    def __init__(self, slots: Tensor, parameters: Delta, page_size: int) -> None:
        self.slots, self.parameters, self.page_size = slots, parameters, page_size
        self.selected: list[int] | None = None

    def reads(self, layer: int, queries: Tensor, cache: LayerCache) -> list[int]:
        everything = list(range(len(self.slots)))
        if layer < self.parameters.full_layers:
            return everything
        if layer in self.parameters.named_layers:
            self.selected = _refresh(queries, self.slots, cache, self.parameters, self.page_size)
            return everything
        return everything if self.selected is None else self.selected


def _slots(context: Context, row: int) -> Tensor:
    return context.slots[row, : int(context.lengths[row])]


def _sharp_queries(requests: int, heads: int, seed: int) -> Tensor:
    return 3 * random_queries(requests, heads, DIM, seed)


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 3), (1, 4), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [0, 4, 30])
def test_equals_the_plain_version(page_size: int, kv_heads: int, group: int, dtype: torch.dtype, sinks: int) -> None:
    layers = 7
    caches = [random_cache(SLOTS, kv_heads, DIM, seed=layer, dtype=dtype) for layer in range(layers)]
    context = scattered_context([203, 1, 65, 160], SLOTS, page_size)
    parameters = [
        delta_parameters(64, 20, 2, (2, 5), sinks),
        delta_parameters(64, 20, 2, (2, 5), sinks),
        delta_parameters(17, 17, 0, (0, 3), sinks),
        delta_parameters(48, 16, 1, (3, 5), sinks),
    ]
    step = DeltaStep(context, SCALE, None, parameters, page_size)
    plain = [_PlainStep(_slots(context, row), parameters[row], page_size) for row in range(4)]
    for layer, cache in enumerate(caches):
        queries = _sharp_queries(4, kv_heads * group, seed=layer)
        meter = Meter(4, CPU)
        output = step.attend(layer, queries, cache, meter)
        reads = [each.reads(layer, queries[row], cache) for row, each in enumerate(plain)]
        expected = output_over(queries, context, cache, SCALE, [[own] * kv_heads for own in reads])
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
        attended = [kv_heads * len(own) for own in reads]
        assert meter.attended.tolist() == attended
        assert meter.read_bytes.tolist() == [2 * cache.vector_bytes * tokens for tokens in attended]
        selection = step.select(layer, queries, cache, meter)
        for row, each in enumerate(plain):
            if each.selected is not None:
                for head in range(kv_heads):
                    assert positions_of(selection, context, row, head) == each.selected


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    budget=st.integers(1, 600),
    recency=st.integers(1, 600),
    sinks=st.integers(0, 80),
    page_size=st.sampled_from([1, 3, 16, 64]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_keeps_recency_sinks_and_budget_and_is_dense_when_the_budget_covers_the_context(
    lengths: list[int], budget: int, recency: int, sinks: int, page_size: int, seed: int
) -> None:
    recency = min(recency, budget)
    cache, context = random_cache(SLOTS, 2, DIM, seed), scattered_context(lengths, SLOTS, page_size, seed)
    parameters = [delta_parameters(budget, recency, 0, (0,), sinks)] * len(lengths)
    step = DeltaStep(context, SCALE, None, parameters, page_size)
    queries = random_queries(len(lengths), 4, DIM, seed)
    step.attend(0, queries, cache, Meter(len(lengths), CPU))
    selection = step.select(1, queries, cache, Meter(len(lengths), CPU))
    output = step.attend(1, queries, cache, Meter(len(lengths), CPU))
    dense = dense_output(queries, context, cache, SCALE)
    for row, length in enumerate(lengths):
        positions = positions_of(selection, context, row, 0)
        assert positions == positions_of(selection, context, row, 1)
        pages = max(math.ceil(budget / page_size), math.ceil(recency / page_size) + math.ceil(sinks / page_size))
        assert len(positions) <= pages * page_size
        oldest_kept = max(0, (length - 1) // page_size - math.ceil(recency / page_size) + 1) * page_size
        assert {*range(min(sinks, length)), *range(oldest_kept, length)} <= set(positions)
        if budget >= length:
            torch.testing.assert_close(output[row].double(), dense[row], atol=1e-5, rtol=0)


def test_a_row_is_the_same_whatever_its_neighbours() -> None:
    thresholds = [termination_at(1.0, 2.0, 1), None, termination_at(0.5, 1.0, 2)]
    parameters = [
        delta_parameters(256, 16, 2, (2, 4)),
        delta_parameters(128, 64, 1, (1, 3)),
        delta_parameters(192, 32, 0, (3,)),
    ]
    context = scattered_context([900, 300, 500], SLOTS)
    together = DeltaStep(context, SCALE, Termination.of(thresholds, CPU), parameters, 16)
    alone = [
        DeltaStep(context.rows([row]), SCALE, Termination.of(thresholds[row : row + 1], CPU), [parameters[row]], 16)
        for row in range(3)
    ]
    total = Meter(3, CPU)
    for layer in range(6):
        cache, queries = random_cache(SLOTS, 2, DIM, seed=layer), _sharp_queries(3, 4, seed=layer)
        meter = Meter(3, CPU)
        output = together.attend(layer, queries, cache, meter)
        for row in range(3):
            own_meter = Meter(1, CPU)
            own = alone[row].attend(layer, queries[row : row + 1], cache, own_meter)
            torch.testing.assert_close(output[row], own[0], atol=1e-6, rtol=1e-5)
            for name, counts in vars(meter).items():
                assert counts[row] == getattr(own_meter, name)[0], name
        total.skipped_tiles += meter.skipped_tiles
    assert total.skipped_tiles[0] > 0
    assert total.skipped_tiles[1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_token_scores_are_the_maximum_over_all_heads_however_the_tokens_lie(dtype: torch.dtype, softmax: str) -> None:
    cache = replace(random_cache(8192, 2, DIM, dtype=dtype), softmax=random_softmax(softmax, 4))
    in_place = torch.arange(1000, 2300)
    tables = [
        scattered_context([300], 8192).slots[0],
        in_place,
        # Runs of falling slots, long and short, with single tokens between.
        torch.cat([torch.arange(5000, 6000), torch.tensor([77]), torch.arange(3000, 3700), torch.arange(10, 60)]),
    ]
    lengths = [len(table) for table in tables]
    slots = torch.full((3, max(lengths)), 8192)
    for row, table in enumerate(tables):
        slots[row, : len(table)] = table
    context = Context(slots, torch.tensor(lengths))
    queries = _sharp_queries(3, 4, seed=0)
    step = DeltaStep(context, SCALE, None, [delta_parameters(64, 16, 0, (0,))] * 3, 16)
    meter = Meter(3, CPU)

    output, scores = step.attend_and_score(range(3), queries, cache, meter)

    torch.testing.assert_close(output.double(), dense_output(queries, context, cache, SCALE), atol=1e-5, rtol=0)
    for row, length in enumerate(lengths):
        expected = torch.tensor(_token_scores(queries[row], _slots(context, row), cache), dtype=torch.float64)
        torch.testing.assert_close(scores[row, :length].double(), expected, atol=1e-6, rtol=1e-4)
        assert (scores[row, length:] == 0).all()
    assert meter.attended.tolist() == [2 * length for length in lengths]


def test_a_maximum_over_ranks_gives_the_scores_of_all_heads() -> None:
    cache, context = random_cache(SLOTS, 2, DIM), scattered_context([100, 40], SLOTS)
    queries = random_queries(2, 4, DIM)

    def scores(own: Tensor, cache: LayerCache) -> Tensor:
        step = DeltaStep(context, SCALE, None, [delta_parameters(64, 16, 0, (0,))] * 2, 16)
        return step.attend_and_score(range(2), own, cache, Meter(2, CPU))[1]

    of_ranks = []
    for head in range(2):
        rank = LayerCache(cache.keys[:, head : head + 1], cache.values[:, head : head + 1])
        of_ranks.append(scores(queries[:, 2 * head : 2 * head + 2], rank))
    torch.testing.assert_close(torch.maximum(*of_ranks), scores(queries, cache))


@pytest.mark.parametrize(
    ("budget", "recency", "full_layers", "delta_layers", "sinks", "field"),
    [
        (0, 16, 0, (1,), 0, "budget"),
        (16, 0, 0, (1,), 0, "recency"),
        (16, 17, 0, (1,), 0, "recency"),
        (16, 16, 0, (), 0, "delta_layers"),
        (16, 16, 0, (3, 3), 0, "delta_layers"),
        (16, 16, 2, (1, 3), 0, "delta_layers"),
        (16, 16, 0, (1,), -1, "sinks"),
    ],
)
def test_bad_parameters_are_refused_by_name(
    budget: int, recency: int, full_layers: int, delta_layers: tuple[int, ...], sinks: int, field: str
) -> None:
    with pytest.raises(ValueError, match=rf"(?m)^{field}$"):
        Delta(budget=budget, recency=recency, full_layers=full_layers, delta_layers=delta_layers, sinks=sinks)
