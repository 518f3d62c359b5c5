"""Ada-SnapKV: how a layer's budget is dealt out to its KV heads, against its definition in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.parameters import snapkv_parameters
from tests.kernels.selected_tokens import output_over, positions_of
from tests.kernels.window_votes import pooled, window_votes
from winnow_kernels.attend.gather import Meter
from winnow_kernels.policies.ada_snapkv.parameters import AdaSnapKV
from winnow_kernels.policies.ada_snapkv.reference import AdaSnapKVState, shared_counts
from winnow_kernels.policies.snapkv.observation import ObservationBuffer
from winnow_kernels.policies.snapkv.reference import SnapKVState, SnapKVStep

SLOTS, DIM, KV_HEADS, GROUP = 2048, 32, 3, 2
SCALE = DIM**-0.5
CPU = torch.device("cpu")


def parameters(budget: int, floor: float, kernel: int = 5, window: int = 16, sinks: int = 4) -> AdaSnapKV:
    return AdaSnapKV.model_construct(
        budget=budget, floor=floor, kernel_size=kernel, observation_window=window, sinks=sinks
    )


@given(
    votes=st.lists(st.lists(st.integers(0, 9), min_size=12, max_size=12), min_size=1, max_size=4),
    mean=st.integers(0, 12),
    floor=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)
@settings(max_examples=200)
def test_heads_share_what_the_floor_leaves_by_their_votes(votes: list[list[int]], mean: int, floor: float) -> None:
    ordered = torch.tensor(votes, dtype=torch.float32).sort(dim=-1, descending=True).values
    counts = shared_counts(ordered, mean, floor).tolist()
    least = math.floor(floor * mean)
    assert sum(counts) == mean * len(votes)
    assert all(least <= count <= 12 for count in counts)
    # Nobody keeps a token beyond the floor while another head leaves one with more votes.
    last = [float(own[count - 1]) for own, count in zip(ordered, counts, strict=True) if count > least]
    left = [float(own[count]) for own, count in zip(ordered, counts, strict=True) if count < 12]
    assert not last or not left or min(last) >= max(left)


@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
def test_equals_the_plain_version(floor: float) -> None:
    cache = random_cache(SLOTS, KV_HEADS, DIM)
    # A head whose attention is concentrated.
    cache.keys[:, 0] *= 4
    prompt, generated, budget, window, sinks = 300, 70, 80, 16, 4
    context = scattered_context([prompt + generated], SLOTS)
    asked = random_queries(prompt, KV_HEADS * GROUP, DIM)
    state = AdaSnapKVState(parameters(budget, floor), ObservationBuffer(window, prompt))
    state.record(0, asked, 0)
    queries = random_queries(1, KV_HEADS * GROUP, DIM, seed=1)
    step = SnapKVStep(context, SCALE, None, [state])
    selection = step.select(0, queries, cache, Meter(1, CPU))
    output = step.attend(0, queries, cache, Meter(1, CPU))

    votes = pooled(window_votes(asked, context.slots[0, :prompt], cache, window, SCALE), 5)[:, sinks:]
    mean = budget - window - sinks
    least = math.floor(floor * mean)
    ranked = votes.sort(dim=-1, descending=True).values
    cut = ranked[:, least:].flatten().sort(descending=True).values[: KV_HEADS * (mean - least)]
    positions = [positions_of(selection, context, 0, head) for head in range(KV_HEADS)]
    always = {*range(sinks), *range(prompt - window, prompt + generated)}
    kept = [sorted(set(own) - always) for own in positions]
    assert sum(map(len, kept)) == KV_HEADS * mean
    for head, own in enumerate(kept):
        assert always <= set(positions[head])
        assert len(own) >= least
        lowest = float(ranked[head, least - 1]) if len(own) == least else float(cut[-1])
        assert all(float(votes[head, at - sinks]) >= lowest - 1e-6 for at in own)
    if floor == 1.0:
        assert {len(own) for own in kept} == {mean}
    else:
        assert len({len(own) for own in kept}) > 1
    torch.testing.assert_close(
        output.double(), output_over(queries, context, cache, SCALE, [positions]), atol=1e-5, rtol=0
    )


def test_an_even_split_is_snapkv() -> None:
    cache, prompt = random_cache(SLOTS, KV_HEADS, DIM), 200
    context = scattered_context([prompt], SLOTS)
    asked = random_queries(prompt, KV_HEADS * GROUP, DIM)
    even = AdaSnapKVState(parameters(64, 1.0), ObservationBuffer(16, prompt))
    plain = SnapKVState(snapkv_parameters(64, 5, 16, 4), ObservationBuffer(16, prompt))
    for state in (even, plain):
        state.record(0, asked, 0)
        state.vote(0, cache, context.slots[0], SCALE, Meter(1, CPU))
    assert torch.equal(even.kept[0], plain.kept[0])
    assert torch.equal(even.counts(0), plain.counts(0))


def test_a_bad_floor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"(?m)^floor$"):
        AdaSnapKV(floor=1.5)
