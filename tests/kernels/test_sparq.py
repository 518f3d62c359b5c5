"""SparQ's selection against its definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.selected_tokens import dense_output, output_over, positions_of
from winnow_kernels.attend.gather import Meter
from winnow_kernels.policies.sparq.parameters import SparQ
from winnow_kernels.policies.sparq.reference import SparQStep, largest_channels

SLOTS, DIM, PAGE = 2048, 32, 16
SCALE = DIM**-0.5
CPU = torch.device("cpu")


def parameters(budget: int, channels: int, sinks: int = 0) -> SparQ:
    return SparQ.model_construct(budget=budget, budget_ratio=None, channels=channels, sinks=sinks)


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 400), st.integers(1, 200), st.integers(1, 40), st.integers(0, 20)),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from([(1, 4), (2, 2), (3, 1)]),
)
@settings(max_examples=40)
def test_keeps_the_newest_page_sinks_and_the_highest_approximate_scores(
    rows: list[tuple[int, int, int, int]], heads: tuple[int, int]
) -> None:
    kv_heads, group = heads
    cache = random_cache(SLOTS, kv_heads, DIM)
    context = scattered_context([length for length, *_ in rows], SLOTS)
    queries = random_queries(len(rows), kv_heads * group, DIM)
    of_rows = [parameters(budget, channels, sinks) for _, budget, channels, sinks in rows]
    step = SparQStep(context, SCALE, None, of_rows, PAGE)
    meter = Meter(len(rows), CPU)
    selection = step.select(0, queries, cache, meter)
    scored_bytes = meter.read_bytes.tolist()
    output = step.attend(0, queries, cache, meter)

    positions = []
    for request, (length, budget, channels, sinks) in enumerate(rows):
        earlier = (length - 1) // PAGE * PAGE
        assert scored_bytes[request] == earlier * kv_heads * cache.vector_bytes
        always = {*range(min(sinks, earlier)), *range(earlier, length)}
        positions.append([positions_of(selection, context, request, head) for head in range(kv_heads)])
        for head in range(kv_heads):
            own = queries[request, head * group : (head + 1) * group].double()
            largest = own.abs().sum(0).sort(descending=True, stable=True).indices[:channels]
            keys = cache.keys[context.slots[request, :earlier], head].double()
            scores = (keys[:, largest] @ own[:, largest].T).amax(1)
            kept = positions[request][head]
            assert len(kept) == len(set(kept)) == max(len(always), min(length, max(budget, sinks + 1)))
            assert always <= set(kept)
            chosen = [at for at in kept if at not in always]
            left = [at for at in range(earlier) if at not in kept]
            if chosen and left:
                assert float(scores[chosen].min()) >= float(scores[left].max()) - 1e-5
    torch.testing.assert_close(
        output.double(), output_over(queries, context, cache, SCALE, positions), atol=1e-5, rtol=0
    )


def test_a_budget_over_the_whole_context_is_dense() -> None:
    cache, context, queries = random_cache(SLOTS, 2, DIM), scattered_context([100, 7], SLOTS), random_queries(2, 4, DIM)
    step = SparQStep(context, SCALE, None, [parameters(400, 4)] * 2, PAGE)
    output = step.attend(0, queries, cache, Meter(2, CPU))
    torch.testing.assert_close(output.double(), dense_output(queries, context, cache, SCALE), atol=1e-5, rtol=0)


def test_of_equal_channels_the_first_count() -> None:
    grouped = torch.tensor([[[[1.0, -2.0, 2.0, 0.5]]], [[[1.0, -2.0, 2.0, 0.5]]]])
    kept = largest_channels(grouped, torch.tensor([1, 3]))
    assert kept.flatten().tolist() == [0, -2, 0, 0, 1, -2, 2, 0]


@pytest.mark.parametrize("channels", [0, 257])
def test_a_bad_number_of_channels_is_refused(channels: int) -> None:
    with pytest.raises(ValueError, match=r"(?m)^channels$"):
        SparQ(channels=channels)
