"""SnapKV against a plain float64 version: what is kept, the order, output, counts, retraction."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.parameters import pyramidkv_parameters, snapkv_parameters, termination_at
from tests.kernels.selected_tokens import dense_output, output_over, positions_of
from tests.kernels.window_votes import pooled, window_votes
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.policies.pyramidkv.parameters import PyramidKV
from winnow_kernels.policies.pyramidkv.reference import PyramidKVState
from winnow_kernels.policies.snapkv.observation import ObservationBuffer
from winnow_kernels.policies.snapkv.parameters import SnapKV
from winnow_kernels.policies.snapkv.reference import SnapKVState, SnapKVStep

SLOTS, DIM = 2048, 32
SCALE = DIM**-0.5
CPU = torch.device("cpu")


def _prompt_queries(prompt: int, heads: int, layer: int = 0) -> Tensor:
    return random_queries(prompt, heads, DIM, seed=100 * prompt + layer)


def _state(prompt: int, heads: int, parameters: SnapKV | PyramidKV, layers: Sequence[int] = (0,)) -> SnapKVState:
    buffer = ObservationBuffer(parameters.observation_window, prompt)
    for layer in layers:
        buffer.record(layer, _prompt_queries(prompt, heads, layer), 0)
    if isinstance(parameters, PyramidKV):
        return PyramidKVState(parameters, buffer, layers)
    return SnapKVState(parameters, buffer)


def _check(
    positions: list[int],
    votes: Tensor,
    length: int,
    prompt: int,
    window: int,
    budget: int,
    sinks: int,
) -> None:
    """The newest 64 generated tokens, then of the prompt window, sinks and most votes, in proportion with others."""
    window = min(window, prompt)
    front = min(64, length - prompt)
    of_prompt = [position for position in positions if position < prompt]
    generated = [position for position in positions if position >= prompt]
    assert positions[:front] == generated[:front]
    for index in range(front, len(positions)):
        share = (index - front) * len(of_prompt) / (len(positions) - front)
        assert 0 <= sum(position < prompt for position in positions[:index]) - share < 1
    positions = generated + of_prompt
    sinks = min(sinks, prompt - window)
    always = list(range(length - 1, prompt - window - 1, -1)) + list(range(sinks))
    assert positions[: len(always)] == always
    chosen = positions[len(always) :]
    assert len(chosen) == min(prompt - window - sinks, max(0, budget - window - sinks))
    if chosen:
        own = votes[chosen]
        assert (own[:-1] >= own[1:] - 1e-6).all()
        left = torch.ones(len(votes), dtype=torch.bool)
        left[chosen + list(range(sinks))] = False
        assert not left.any() or float(own[-1]) >= float(votes[left].max()) - 1e-6
        equal = [(a, b) for a, b in itertools.pairwise(chosen) if votes[a] == votes[b]]
        assert all(a < b for a, b in equal)


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 3), (1, 4), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [0, 4, 30])
def test_equals_the_plain_version(kv_heads: int, group: int, dtype: torch.dtype, sinks: int) -> None:
    cache = random_cache(SLOTS, kv_heads, DIM, dtype=dtype)
    prompts, generated, budgets, windows, kernels = (
        [300, 40, 64, 9],
        [5, 1, 0, 150],
        [64, 20, 200, 4],
        [16, 32, 8, 6],
        [5, 1, 7, 3],
    )
    context = scattered_context([p + g for p, g in zip(prompts, generated, strict=True)], SLOTS)
    heads = kv_heads * group
    states = [
        _state(prompt, heads, snapkv_parameters(budget, kernel, window, sinks))
        for prompt, window, budget, kernel in zip(prompts, windows, budgets, kernels, strict=True)
    ]
    queries = random_queries(4, heads, DIM)
    step = SnapKVStep(context, SCALE, None, states)
    meter = Meter(4, CPU)

    selection = step.select(0, queries, cache, meter)
    voting = meter.read_bytes.tolist()
    output = step.attend(0, queries, cache, meter)

    positions = [[positions_of(selection, context, r, h) for h in range(kv_heads)] for r in range(4)]
    for r, prompt in enumerate(prompts):
        plain = window_votes(_prompt_queries(prompt, heads), context.slots[r, :prompt], cache, windows[r], SCALE)
        votes = pooled(plain, kernels[r])
        for h in range(kv_heads):
            _check(positions[r][h], votes[h], prompt + generated[r], prompt, windows[r], budgets[r], sinks)
    torch.testing.assert_close(
        output.double(), output_over(queries, context, cache, SCALE, positions), atol=1e-5, rtol=0
    )
    assert voting == [prompt * kv_heads * cache.vector_bytes for prompt in prompts]
    attended = [sum(map(len, of_heads)) for of_heads in positions]
    assert meter.attended.tolist() == attended
    assert meter.read_bytes.tolist() == [v + 2 * a * cache.vector_bytes for v, a in zip(voting, attended, strict=True)]


@given(
    rows=st.lists(
        st.tuples(
            st.integers(1, 200), st.integers(0, 40), st.integers(1, 250), st.integers(1, 60), st.sampled_from([1, 3, 5])
        ),
        min_size=1,
        max_size=4,
    ),
    sinks=st.integers(0, 80),
)
@settings(max_examples=30)
def test_keeps_budget_window_and_sinks_and_is_dense_when_the_budget_covers_the_prompt(
    rows: list[tuple[int, int, int, int, int]], sinks: int
) -> None:
    cache = random_cache(SLOTS, 2, DIM)
    context = scattered_context([prompt + generated for prompt, generated, *_ in rows], SLOTS)
    states = [
        _state(prompt, 4, snapkv_parameters(budget, kernel, window, sinks))
        for prompt, _, budget, window, kernel in rows
    ]
    queries = random_queries(len(rows), 4, DIM)
    step = SnapKVStep(context, SCALE, None, states)
    selection = step.select(0, queries, cache, Meter(len(rows), CPU))
    output = step.attend(0, queries, cache, Meter(len(rows), CPU))
    dense = dense_output(queries, context, cache, SCALE)
    for request, (prompt, generated, budget, window, _) in enumerate(rows):
        for head in range(2):
            positions = positions_of(selection, context, request, head)
            assert len(positions) == generated + min(max(budget, min(window, prompt) + sinks), prompt)
            always = {*range(min(sinks, prompt)), *range(max(0, prompt - window), prompt + generated)}
            assert always <= set(positions)
        if budget >= prompt:
            torch.testing.assert_close(output[request].double(), dense[request], atol=1e-5, rtol=0)


def test_votes_are_cast_once_and_outlive_a_move_to_other_slots() -> None:
    cache, prompt = random_cache(SLOTS, 2, DIM), 200
    state = _state(prompt, 4, snapkv_parameters(48, 5, 16))
    queries = random_queries(1, 4, DIM)
    before = scattered_context([prompt + 1], SLOTS, seed=1)
    first = SnapKVStep(before, SCALE, None, [state]).select(0, queries, cache, Meter(1, CPU))
    after = scattered_context([prompt + 3], SLOTS, seed=2)
    meter = Meter(1, CPU)
    later = SnapKVStep(after, SCALE, None, [state]).select(0, queries, cache, meter)
    assert meter.read_bytes.tolist() == [0]
    for head in range(2):
        kept = positions_of(first, before, 0, head)
        assert positions_of(later, after, 0, head) == [prompt + 2, prompt + 1, *kept]


def test_a_batch_may_mix_snapkv_and_pyramidkv() -> None:
    cache, layers = random_cache(SLOTS, 2, DIM), range(4)
    context = scattered_context([301, 251], SLOTS)
    queries = random_queries(2, 4, DIM)

    def states() -> list[SnapKVState]:
        return [
            _state(300, 4, snapkv_parameters(64, 5, 16), layers),
            _state(250, 4, pyramidkv_parameters(64, 5, 16), layers),
        ]

    together = SnapKVStep(context, SCALE, None, states())
    widths = []
    for layer in layers:
        output = together.attend(layer, queries, cache, Meter(2, CPU))
        widths.append(together.select(layer, queries, cache, Meter(2, CPU)).counts[:, 0].tolist())
        for row, state in enumerate(states()):
            alone = SnapKVStep(context.rows([row]), SCALE, None, [state])
            own = alone.attend(layer, queries[row : row + 1], cache, Meter(1, CPU))
            torch.testing.assert_close(output[row], own[0], atol=1e-6, rtol=1e-6)
    assert [snap for snap, _ in widths] == [65] * 4
    pyramid = [width for _, width in widths]
    assert pyramid == sorted(pyramid, reverse=True)
    assert pyramid[0] > pyramid[-1]
    assert sum(pyramid) == 4 * 65


@pytest.mark.parametrize(
    ("budget", "kernel_size", "sinks", "field"),
    [(0, 5, 0, "budget"), (64, 4, 0, "kernel_size"), (64, -1, 0, "kernel_size"), (64, 5, -1, "sinks")],
)
def test_bad_parameters_are_refused_by_name(budget: int, kernel_size: int, sinks: int, field: str) -> None:
    with pytest.raises(ValueError, match=rf"(?m)^{field}$"):
        SnapKV(budget=budget, kernel_size=kernel_size, sinks=sinks)


def test_a_long_answer_is_not_dropped_when_what_is_kept_of_the_prompt_agrees() -> None:
    prompt, kept, generated = 2000, 1000, 2040
    cache = random_cache(2 * SLOTS, 1, DIM)
    cache.keys.zero_()
    context = scattered_context([prompt + generated], 2 * SLOTS)
    said = torch.randn(2, DIM)
    cache.values[context.slots[0, :prompt], 0] = said[0]
    cache.values[context.slots[0, prompt:], 0] = said[1]
    state = SnapKVState(snapkv_parameters(kept, 5, 32), ObservationBuffer(32, prompt))
    state.kept[0] = torch.arange(prompt - 1, prompt - kept - 1, -1)[None]
    queries = random_queries(1, 2, DIM)
    early = Termination.of([termination_at(0.03, 0.01, 4)], CPU)
    patient, hasty = (
        SnapKVStep(context, 1.0, termination, [state]).attend(0, queries, cache, Meter(1, CPU))
        for termination in (None, early)
    )
    assert float((hasty - patient).norm() / patient.norm()) < 0.1
