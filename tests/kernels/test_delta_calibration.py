"""The choice of Δ-layers: shifts against a plain version, peaks, distances."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnow_kernels.delta_calibration import (
    MeanShifts,
    choose_delta_layers,
    layer_shifts,
    minimum_distance,
    token_scores,
)


def _shift(before: list[float], after: list[float]) -> float:
    product = math.fsum(b * a for b, a in zip(before, after, strict=True))
    return 1 - product / math.hypot(*before) / math.hypot(*after)


def test_shifts_equal_the_plain_version() -> None:
    rng = random.Random(0)
    weights = [[[rng.random() for _ in range(50)] for _ in range(4)] for _ in range(6)]
    scores = [token_scores(torch.tensor(layer)) for layer in weights]
    plain = [[max(head[token] for head in layer) for token in range(50)] for layer in weights]
    for ours, theirs in zip(scores, plain, strict=True):
        torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), atol=1e-6, rtol=0)
    expected = [0.0] + [_shift(plain[layer - 1], plain[layer]) for layer in range(1, 6)]
    assert layer_shifts(scores).tolist() == pytest.approx(expected, abs=1e-6)


def test_the_mean_is_over_all_steps() -> None:
    shifts = MeanShifts()
    with pytest.raises(ValueError, match="no decode step"):
        shifts.mean()
    for step in ([0.0, 0.2, 0.4], [0.0, 0.4, 0.0], [0.0, 0.9, 0.2]):
        shifts.add(torch.tensor(step, dtype=torch.float64))
    assert shifts.steps == 3
    assert shifts.mean() == pytest.approx([0.0, 0.5, 0.2])


def test_the_largest_shifts_are_chosen_but_not_two_neighbours() -> None:
    shifts = [0.1] * 28
    shifts[1], shifts[3], shifts[14], shifts[15], shifts[23] = 0.99, 0.95, 0.9, 0.89, 0.5
    assert choose_delta_layers(shifts, full_layers=2) == (2, 14, 23)


@pytest.mark.parametrize(
    ("layers", "delta_layers"), [(28, (2, 14, 23)), (28, (2, 14, 22)), (48, (2, 6, 42)), (32, (2, 8, 31))]
)
def test_the_papers_choices_are_possible(layers: int, delta_layers: tuple[int, ...]) -> None:
    shifts = [0.9 if layer in delta_layers else 0.1 for layer in range(layers)]
    assert choose_delta_layers(shifts, full_layers=2) == delta_layers


@given(st.lists(st.floats(0, 1), min_size=1, max_size=80), st.integers(0, 5), st.integers(1, 6))
def test_choices_ascend_lie_apart_and_begin_after_the_full_layers(
    shifts: list[float], full_layers: int, count: int
) -> None:
    if full_layers >= len(shifts):
        with pytest.raises(ValueError, match="full_layers"):
            choose_delta_layers(shifts, full_layers, count)
        return
    chosen = choose_delta_layers(shifts, full_layers, count)
    assert chosen[0] == full_layers
    assert 1 <= len(chosen) <= count
    distance = minimum_distance(len(shifts))
    assert all(after - before >= distance for before, after in itertools.pairwise(chosen))
    if len(chosen) < count:
        apart = [all(abs(layer - own) >= distance for own in chosen) for layer in range(full_layers, len(shifts))]
        assert not any(apart)
