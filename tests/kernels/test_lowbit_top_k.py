"""``lowbit_top_k`` against a plain float64 version, and what always holds of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.coded_cases import CPU, Case, never
from tests.kernels.coded_float64 import kept_positions
from tests.kernels.parameters import lowbit_top_k_parameters
from tests.kernels.selected_tokens import dense_output, output_over, positions_of
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.decode.coded_tokens import read_whole_until, tokens_read
from winnow_kernels.decode.predicted_attention import LOWEST_KEY, highest
from winnow_kernels.policies.lowbit_top_k.parameters import LowBitTopK
from winnow_kernels.policies.lowbit_top_k.reference import LowBitTopKStep


def step_of(case: Case, parameters: list[LowBitTopK], termination: Termination | None = None) -> LowBitTopKStep:
    return LowBitTopKStep(case.context, case.scale, termination, parameters, case.codes)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "bits"),
    [(2, 4, 64, 2), (1, 7, 80, 2), (3, 1, 128, 3), (1, 2, 256, 4), (1, 16, 96, 2)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_order", [False, True])
def test_equals_the_plain_version(
    kv_heads: int, group: int, head_dim: int, bits: int, dtype: torch.dtype, in_order: bool
) -> None:
    lengths = [700, 300, 96, 513]
    case = Case.of(lengths, kv_heads, head_dim, bits, dtype=dtype)
    parameters = [
        lowbit_top_k_parameters(200, sinks=16),
        lowbit_top_k_parameters(budget_ratio=0.4),
        lowbit_top_k_parameters(90, sinks=16),
        lowbit_top_k_parameters(40, sinks=100),
    ]
    counts = [200, math.ceil(0.4 * 299) + 1, 96, 65 + 112]
    queries = case.queries(group, sharpness=3.0).to(dtype)
    step = step_of(case, parameters, never(4) if in_order else None)
    meter = Meter(4, CPU)
    output = step.attend(0, queries, case.cache, meter)
    selection = step.select(0, queries, case.cache, Meter(4, CPU))
    expected = []
    for request, own in enumerate(parameters):
        assert selection.counts[request].tolist() == [counts[request]] * kv_heads
        of_heads = [case.head(queries, request, head, own.sinks) for head in range(kv_heads)]
        taken = [known.top_k(counts[request]) for known in of_heads]
        expected.append(
            [known.positions(chosen, in_order=in_order) for known, chosen in zip(of_heads, taken, strict=True)]
        )
        for head in range(kv_heads):
            assert positions_of(selection, case.context, request, head) == expected[-1][head]
    assert meter.attended.tolist() == [kv_heads * count for count in counts]
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    outputs = output_over(queries.float(), case.context, case.cache, case.scale, expected)
    torch.testing.assert_close(output.double(), outputs, atol=atol, rtol=0)


@given(
    length=st.integers(1, 600),
    budget=st.integers(1, 700) | st.floats(0.01, 1),
    sinks=st.integers(0, 200),
    page_size=st.sampled_from([16, 64]),
    sharpness=st.floats(0.1, 40.0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_the_budget_is_kept_to_the_token(
    length: int, budget: float, sinks: int, page_size: int, sharpness: float, seed: int
) -> None:
    case = Case.of([length], page_size=page_size, seed=seed)
    if isinstance(budget, int):
        parameters = lowbit_top_k_parameters(budget, sinks=sinks)
        wanted = budget
    else:
        parameters = lowbit_top_k_parameters(budget_ratio=budget, sinks=sinks)
        wanted = math.ceil(budget * (length - 1)) + 1
    kept = kept_positions(length, sinks, page_size)
    tokens = max(len(kept), min(length, max(wanted, sinks + 1)))
    if tokens > 0.75 * length:
        tokens = length
    step = step_of(case, [parameters])
    selection = step.select(0, case.queries(2, sharpness, seed), case.cache, Meter(1, CPU))
    assert selection.counts.tolist() == [[tokens, tokens]]
    assert tokens_read(parameters.tokens(length - 1), sinks, length, page_size) == tokens
    for head in range(2):
        positions = positions_of(selection, case.context, 0, head)
        assert positions[: len(kept)] == kept or positions == [*range(length - 1, -1, -1)]


@given(budget=st.integers(16, 3000))
def test_up_to_which_length_a_budget_reads_everything(budget: int) -> None:
    last = read_whole_until(budget)
    assert tokens_read(budget, 0, last, 16) == last
    # More than what is always kept.
    if budget >= 80:
        assert tokens_read(budget, 0, last + 1, 16) == budget


def test_the_mean_of_a_groups_shares_decides() -> None:
    """A token that one head needs much outranks one that both need a little, whatever the heads' scores are like."""
    case = Case.of([512], kv_heads=1, head_dim=64)
    slots = case.context.slots[0, :512]
    first, second = torch.eye(64)[:2]
    case.cache.keys[slots] = 0.0
    case.cache.keys[slots[100], 0] = 20 * first
    case.cache.keys[slots[200], 0] = 8 * first + 8 * second
    # The second head's scores are higher by far, and as alike.
    case.cache.keys[slots, 0] += 30 * torch.eye(64)[2]
    queries = torch.stack([4 * first, 2 * second + 5 * torch.eye(64)[2]])[None]
    step = step_of(case, [lowbit_top_k_parameters(65)], never(1))
    selection = step.select(0, queries, case.cache, Meter(1, CPU))
    assert positions_of(selection, case.context, 0, 0) == [*kept_positions(512, 0, 16), 100]


def test_of_equal_keys_the_first_are_taken() -> None:
    keys = torch.tensor([[-5, -3, -5, -5, -1], [LOWEST_KEY] * 5])
    assert highest(keys, 3).tolist() == [[True, True, False, False, True], [True, True, True, False, False]]
    assert not highest(keys, 0).any()
    assert highest(keys, 9).all()


def test_keys_of_one_value_are_taken_from_the_front() -> None:
    case = Case.of([300], kv_heads=1)
    case.cache.keys[:] = case.cache.keys[0]
    step = step_of(case, [lowbit_top_k_parameters(120, sinks=4)])
    selection = step.select(0, case.queries(3), case.cache, Meter(1, CPU))
    kept = kept_positions(300, 4, 16)
    assert positions_of(selection, case.context, 0, 0) == [*kept, *range(16, 16 + 120 - len(kept))]


def test_a_budget_over_the_whole_context_is_dense() -> None:
    case = Case.of([100, 7])
    queries = case.queries(2)
    output = step_of(case, [lowbit_top_k_parameters(400)] * 2).attend(0, queries, case.cache, Meter(2, CPU))
    expected = dense_output(queries, case.context, case.cache, case.scale)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"budget": 31}, "budget"),
        ({"budget": 512, "budget_ratio": 0.5}, "budget"),
        ({"budget_ratio": 0.0}, "budget_ratio"),
        ({"sinks": -1}, "sinks"),
        ({"p": 0.9}, "p"),
    ],
)
def test_bad_parameters_are_refused_by_name(fields: dict[str, float], field: str) -> None:
    with pytest.raises(ValueError, match=rf"(?m)^{field}$"):
        LowBitTopK.model_validate(fields)
