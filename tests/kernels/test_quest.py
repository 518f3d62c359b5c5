"""Quest against a plain float64 version: bounds, upper scores, pages, output, counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.parameters import quest_parameters, termination_at
from tests.kernels.selected_tokens import dense_output, output_over, positions_of
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.policies.quest.parameters import Quest
from winnow_kernels.policies.quest.reference import QuestStep

SLOTS, DIM = 2400, 32
SCALE = DIM**-0.5
CPU = torch.device("cpu")


def _bounds(cache: LayerCache, page_size: int, layers: int = 1) -> PageBounds:
    return PageBounds([cache] * layers, PageGenerations(cache.slots, page_size, CPU))


def _upper(queries: Tensor, keys: Tensor) -> float:
    """The greatest upper score of a page with these keys, [tokens, head dim], for any of the group's queries."""
    scores = []
    for query in queries.double():
        total = 0.0
        for channel in range(DIM):
            least, most = float(keys[:, channel].min()), float(keys[:, channel].max())
            total += max(float(query[channel]) * least, float(query[channel]) * most)
        scores.append(total)
    return max(scores)


def _expected(
    queries: Tensor,
    context: Context,
    cache: LayerCache,
    request: int,
    head: int,
    budget: int,
    page_size: int,
    sinks: int = 0,
) -> list[int]:
    """The positions that a KV head reads, in order."""
    length, size = int(context.lengths[request]), queries.shape[1] // cache.kv_heads
    own = queries[request, head * size : (head + 1) * size]
    newest = (length - 1) // page_size
    first = min(math.ceil(sinks / page_size), newest)
    upper = {}
    for page in range(first, newest):
        slots = context.slots[request, page * page_size : (page + 1) * page_size]
        upper[page] = _upper(own, cache.keys[slots, head])
    wanted = max(0, math.ceil(budget / page_size) - 1 - first)
    others = sorted(upper, key=lambda page: upper[page], reverse=True)[:wanted]
    positions = list(range(length - 1, newest * page_size - 1, -1))
    for page in [*range(first), *others]:
        positions += range(page * page_size, (page + 1) * page_size)
    return positions


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 3), (1, 4), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [0, 4, 30])
def test_equals_the_plain_version(page_size: int, kv_heads: int, group: int, dtype: torch.dtype, sinks: int) -> None:
    cache = random_cache(SLOTS, kv_heads, DIM, dtype=dtype)
    context = scattered_context([101, 1, 16, 33], SLOTS, page_size)
    budgets = [40, 16, 5, 1]
    queries = random_queries(4, kv_heads * group, DIM)
    bounds = _bounds(cache, page_size)
    step = QuestStep(context, SCALE, None, [quest_parameters(budget, 0, sinks) for budget in budgets], bounds)
    meter = Meter(4, CPU)

    output = step.attend(0, queries, cache, meter)
    selection = step.select(0, queries, cache, Meter(4, CPU))

    expected = [
        [_expected(queries, context, cache, r, h, budget, page_size, sinks) for h in range(kv_heads)]
        for r, budget in enumerate(budgets)
    ]
    for request, of_heads in enumerate(expected):
        for head, own in enumerate(of_heads):
            assert positions_of(selection, context, request, head) == own
            pages = max(math.ceil(budgets[request] / page_size), 1 + math.ceil(sinks / page_size))
            assert len(own) <= pages * page_size
    torch.testing.assert_close(
        output.double(), output_over(queries, context, cache, SCALE, expected), atol=1e-5, rtol=0
    )
    attended = [sum(len(own) for own in of_heads) for of_heads in expected]
    vector = DIM * cache.keys.element_size()
    indexed = [(int(length) - 1) // page_size * kv_heads for length in context.lengths]
    assert meter.attended.tolist() == attended
    assert meter.read_bytes.tolist() == [2 * vector * (a + i) for a, i in zip(attended, indexed, strict=True)]
    assert step.index_built_tokens == [(int(length) - 1) // page_size * page_size for length in context.lengths]


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    budget=st.integers(1, 600),
    sinks=st.integers(0, 80),
    page_size=st.sampled_from([1, 3, 16, 64]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_selects_within_context_and_budget_with_the_newest_page_and_the_sinks(
    lengths: list[int], budget: int, sinks: int, page_size: int, seed: int
) -> None:
    cache = random_cache(SLOTS, 2, DIM, seed)
    context = scattered_context(lengths, SLOTS, page_size, seed)
    queries = random_queries(len(lengths), 4, DIM, seed)
    parameters = [quest_parameters(budget, 0, sinks)] * len(lengths)
    step = QuestStep(context, SCALE, None, parameters, _bounds(cache, page_size))
    selection = step.select(0, queries, cache, Meter(len(lengths), CPU))
    for request, length in enumerate(lengths):
        for head in range(2):
            positions = positions_of(selection, context, request, head)
            assert {*range(min(sinks, length)), *range((length - 1) // page_size * page_size, length)} <= set(positions)
            pages = max(math.ceil(budget / page_size), 1 + math.ceil(sinks / page_size))
            assert len(positions) <= pages * page_size
            if budget >= length:
                assert sorted(positions) == list(range(length))


def test_full_layers_are_dense_for_the_rows_that_ask_for_it_and_alike_whatever_their_neighbours() -> None:
    cache, context = random_cache(SLOTS, 2, DIM), scattered_context([300, 200, 90], SLOTS)
    queries = random_queries(3, 4, DIM)
    parameters = [quest_parameters(32, 0), quest_parameters(32, 2), quest_parameters(32, 1)]
    bounds = _bounds(cache, 16, layers=3)
    thresholds = [termination_at(1.0, 2.0, 1), None, termination_at(1.0, 2.0, 1)]
    together = QuestStep(context, SCALE, Termination.of(thresholds, CPU), parameters, bounds)
    dense = dense_output(queries, context, cache, SCALE)
    for layer in range(3):
        meter = Meter(3, CPU)
        output = together.attend(layer, queries, cache, meter)
        for row in range(3):
            alone = QuestStep(
                context.rows([row]), SCALE, Termination.of(thresholds[row : row + 1], CPU), [parameters[row]], bounds
            )
            own_meter = Meter(1, CPU)
            own = alone.attend(layer, queries[row : row + 1], cache, own_meter)
            torch.testing.assert_close(output[row], own[0], atol=1e-6, rtol=1e-6)
            for name, counts in vars(meter).items():
                assert counts[row] == getattr(own_meter, name)[0], name
            is_dense = layer < parameters[row].full_layers
            assert torch.allclose(output[row].double(), dense[row], atol=1e-5) == is_dense
            assert (meter.attended[row] == 2 * context.lengths[row]) == is_dense


def test_a_page_that_is_written_anew_gets_new_bounds() -> None:
    cache, context = random_cache(SLOTS, 2, DIM), scattered_context([64], SLOTS)
    bounds = _bounds(cache, 16)
    parameters = [quest_parameters(32, 0)]
    assert QuestStep(context, SCALE, None, parameters, bounds).index_built_tokens == [48]
    assert QuestStep(context, SCALE, None, parameters, bounds).index_built_tokens == [0]
    rewritten = context.slots[0, 16:32]
    cache.keys[rewritten] = 3 * cache.keys[rewritten].flip(0)
    bounds.generations.written(rewritten)
    queries = random_queries(1, 4, DIM)
    step = QuestStep(context, SCALE, None, parameters, bounds)
    assert step.index_built_tokens == [16]
    selection = step.select(0, queries, cache, Meter(1, CPU))
    for head in range(2):
        expected = _expected(queries, context, cache, 0, head, 32, 16)
        assert positions_of(selection, context, 0, head) == expected


def test_a_page_that_is_filled_beside_the_forward_pass_keeps_old_bounds() -> None:
    """Why servers whose pages come back from the host, or from another server, are refused."""
    cache, context = random_cache(SLOTS, 2, DIM), scattered_context([64], SLOTS)
    bounds = _bounds(cache, 16)
    parameters = [quest_parameters(32, 0)]
    QuestStep(context, SCALE, None, parameters, bounds)
    filled = context.slots[0, 16:32]
    cache.keys[filled] = 3 * cache.keys[filled].flip(0)
    assert QuestStep(context, SCALE, None, parameters, bounds).index_built_tokens == [0]
    page = filled[:1] // 16
    now = bounds.page_keys(cache, page)[0]
    assert (now.amax(0) > bounds.bounds[0][page[0], :, :DIM]).any()


def test_no_key_scores_above_its_pages_upper_score() -> None:
    cache, context = random_cache(SLOTS, 2, DIM), scattered_context([160], SLOTS)
    bounds = _bounds(cache, 16)
    pages = bounds.generations.complete_pages(context, 0, 160)
    bounds.ensure(pages)
    grouped = random_queries(1, 8, DIM).view(1, 2, 4, DIM)
    upper = bounds.upper_scores(0, grouped, pages[None], torch.tensor([10]), Meter(1, CPU))
    keys = cache.keys[context.slots[0]].transpose(0, 1)
    scores = (grouped @ keys.mT).view(1, 2, 4, 10, 16)
    assert (scores <= upper[..., None] + 1e-4).all()


@pytest.mark.parametrize(
    ("budget", "full_layers", "sinks", "field"),
    [(0, 2, 0, "budget"), (32, -1, 0, "full_layers"), (32, 2, -1, "sinks")],
)
def test_bad_parameters_are_refused_by_name(budget: int, full_layers: int, sinks: int, field: str) -> None:
    with pytest.raises(ValueError, match=rf"(?m)^{field}$"):
        Quest(budget=budget, full_layers=full_layers, sinks=sinks)
