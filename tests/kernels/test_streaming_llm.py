"""StreamingLLM's selection against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.parameters import streaming_llm_parameters
from tests.kernels.selected_tokens import dense_output, output_over, positions_of
from winnow_kernels.attend.gather import Meter
from winnow_kernels.policies.streaming_llm.parameters import StreamingLLM
from winnow_kernels.policies.streaming_llm.reference import StreamingLLMStep

SLOTS, DIM = 2048, 32
SCALE = DIM**-0.5


def _expected(length: int, sinks: int, window: int) -> list[int]:
    first = list(range(min(sinks, length)))
    return first + [position for position in range(length - 1, -1, -1) if position >= max(length - window, len(first))]


@given(
    rows=st.lists(st.tuples(st.integers(1, 400), st.integers(0, 20), st.integers(1, 300)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 4), (2, 2), (3, 1)]),
)
@settings(max_examples=40)
def test_reads_sinks_then_the_window_from_the_newest_back(
    rows: list[tuple[int, int, int]], heads: tuple[int, int]
) -> None:
    kv_heads, group = heads
    cache = random_cache(SLOTS, kv_heads, DIM)
    context = scattered_context([length for length, _, _ in rows], SLOTS)
    queries = random_queries(len(rows), kv_heads * group, DIM)
    step = StreamingLLMStep(context, SCALE, None, [streaming_llm_parameters(s, w) for _, s, w in rows])
    meter = Meter(len(rows), torch.device("cpu"))

    selection = step.select(0, queries, cache, meter)
    output = step.attend(0, queries, cache, meter)

    expected = [[_expected(*row)] * kv_heads for row in rows]
    for request, own in enumerate(expected):
        for head in range(kv_heads):
            assert positions_of(selection, context, request, head) == own[head]
    torch.testing.assert_close(
        output.double(), output_over(queries, context, cache, SCALE, expected), atol=1e-5, rtol=0
    )
    assert meter.attended.tolist() == [len(own[0]) * kv_heads for own in expected]


def test_a_window_over_the_whole_context_is_dense() -> None:
    cache, context, queries = random_cache(SLOTS, 2, DIM), scattered_context([100, 7], SLOTS), random_queries(2, 4, DIM)
    step = StreamingLLMStep(context, SCALE, None, [streaming_llm_parameters(4, 1000)] * 2)
    output = step.attend(0, queries, cache, Meter(2, torch.device("cpu")))
    torch.testing.assert_close(output.double(), dense_output(queries, context, cache, SCALE), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("sinks", "window", "field"), [(-1, 16, "sinks"), (0, 0, "window")])
def test_bad_parameters_are_refused_by_name(sinks: int, window: int, field: str) -> None:
    with pytest.raises(ValueError, match=rf"(?m)^{field}$"):
        StreamingLLM(sinks=sinks, window=window)
