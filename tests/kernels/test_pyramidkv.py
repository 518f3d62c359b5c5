"""PyramidKV's budgets: the paper's formula, the mean, the bounds."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.kernels.parameters import pyramidkv_parameters
from winnow_kernels.policies.pyramidkv.reference import PyramidKVState, pyramid
from winnow_kernels.policies.snapkv.observation import ObservationBuffer


def _exact(layers: int, mean: int, most: int) -> list[Fraction]:
    """Arithmetic progression with the paper's ends, or, where the first would exceed ``most``, from ``most`` down."""
    last = Fraction(mean, 20)
    first = 2 * mean - last
    if first > most:
        first, last = Fraction(most), 2 * Fraction(mean) - most
    return [first - (first - last) * layer / (layers - 1) for layer in range(layers)]


@given(layers=st.integers(2, 100), mean=st.integers(0, 100_000), most=st.integers(0, 1_000_000))
def test_budgets_follow_the_progression_and_their_mean_is_exact(layers: int, mean: int, most: int) -> None:
    assume(mean <= most)
    budgets = pyramid(layers, mean, most)
    assert len(budgets) == layers
    assert sum(budgets) == layers * mean
    assert all(0 <= budget <= most for budget in budgets)
    for budget, exact in zip(budgets, _exact(layers, mean, most), strict=True):
        assert abs(budget - exact) <= 1
    assert budgets[0] >= budgets[-1]


def test_one_layer_has_it_all() -> None:
    assert pyramid(1, 100, 1000) == [100]


def test_the_papers_numbers() -> None:
    budgets = pyramid(32, 2000, 100_000)
    assert (budgets[0], budgets[-1]) == (3900, 100)


@given(
    layers=st.integers(1, 64),
    budget=st.integers(1, 5000),
    prompt=st.integers(1, 20_000),
    window=st.integers(1, 256),
    sinks=st.integers(0, 64),
)
def test_each_layer_has_room_for_window_and_sinks_and_the_mean_is_the_budget(
    layers: int, budget: int, prompt: int, window: int, sinks: int
) -> None:
    window = min(window, prompt)
    parameters = pyramidkv_parameters(budget, 5, window, sinks)
    state = PyramidKVState(parameters, ObservationBuffer(window, prompt), range(layers))
    always = min(prompt, window + sinks)
    budgets = [always + state.layer_votes(layer) for layer in range(layers)]
    assert sum(budgets) == layers * min(prompt, max(budget, always))
    assert all(always <= each <= prompt for each in budgets)


def test_only_layers_with_full_attention_share_the_budget() -> None:
    parameters = pyramidkv_parameters(200, 5, 16)
    of_three, of_others = (
        PyramidKVState(parameters, ObservationBuffer(16, 1000), layers) for layers in (range(3), (5, 11, 17))
    )
    budgets = [of_others.layer_votes(layer) for layer in (5, 11, 17)]
    assert budgets == [of_three.layer_votes(layer) for layer in range(3)]
    assert sum(budgets) == 3 * (200 - 16)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^layers: "):
        PyramidKVState(pyramidkv_parameters(100, 5, 16), ObservationBuffer(16, 200), layers=())
