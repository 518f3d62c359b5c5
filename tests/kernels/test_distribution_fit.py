"""How many tokens hold a share of the mass: against the fitted curve written out, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.tactic_float64 import fit, fitted_weights, smallest_count
from winnow_kernels.policies.tactic.distribution_fit import Curve, RankedMass

_WEIGHTS = st.one_of(st.just(0.0), st.floats(1e-12, 1.0))


def _scalar(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def _ranked(exact: list[float], total: int, outside: float, curve: Curve) -> RankedMass:
    first = torch.tensor([exact], dtype=torch.float64).cumsum(-1)
    return RankedMass(_scalar(outside), first, _scalar(len(exact)), _scalar(total), curve)


@given(
    exact=st.lists(_WEIGHTS, max_size=40),
    others=st.integers(0, 3000),
    weight1=_WEIGHTS,
    weight2=_WEIGHTS,
    outside=st.floats(1e-9, 10.0),
    shares=st.lists(st.floats(0.01, 0.999), min_size=2, max_size=2).map(sorted),
)
@settings(max_examples=300, deadline=None)
def test_is_the_smallest_count_and_monotone(
    exact: list[float], others: int, weight1: float, weight2: float, outside: float, shares: list[float]
) -> None:
    total = len(exact) + others
    place1, place2 = 1 + 0.1 * total, 1.5 + 0.6 * total
    curve = Curve.through(*map(_scalar, (place1, weight1, place2, weight2)))
    mass = _ranked(exact, total, outside, curve)
    weights = fitted_weights(exact, total, float(curve.a), float(curve.b))
    whole = outside + weights.sum()
    assert float(mass.total) == pytest.approx(whole, rel=1e-9)
    counts = []
    for share in shares:
        count = int(mass.tokens_for(_scalar(share)))
        counts.append(count)
        assert 0 <= count <= total
        slack = 1e-9 * whole
        assert outside + weights[:count].sum() >= share * whole - slack
        assert count == 0 or outside + weights[: count - 1].sum() < share * whole + slack
        assert float(mass.held_by(_scalar(count))) == pytest.approx(weights[:count].sum(), rel=1e-9, abs=slack)
    assert counts == sorted(counts)
    assert int(mass.tokens_for(_scalar(1.0))) == total


def test_known_counts() -> None:
    # Weights 4, 2, then a flat 1 for eight more: 14 in all, 2 outside.
    mass = _ranked([4.0, 2.0], 10, 2.0, Curve(_scalar(0.0), _scalar(1.0)))
    asked = [0.1, 0.125, 0.126, 0.375, 0.376, 0.5, 0.51, 0.9, 0.999]
    assert [int(mass.tokens_for(_scalar(share))) for share in asked] == [0, 0, 1, 1, 2, 2, 3, 9, 10]


@given(place1=st.floats(1, 1e4), distance=st.floats(1, 1e5), weights=st.lists(_WEIGHTS, min_size=2, max_size=2))
def test_the_curve_goes_through_its_points(place1: float, distance: float, weights: list[float]) -> None:
    place2 = place1 + distance
    curve = Curve.through(*map(_scalar, (place1, weights[0], place2, weights[1])))
    a, b = fit(place1, weights[0], place2, weights[1])
    size = max(weights)
    np.testing.assert_allclose([float(curve.a), float(curve.b)], [a, b], rtol=1e-6, atol=1e-9 * max(size, abs(a)))
    assert float(curve.a) >= 0
    assert float(curve.b) >= 0 or float(curve.a) > 0


def test_many_heads_at_once_are_the_heads_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 2, 4)
    exact = torch.rand(*shape, 30, generator=generator, dtype=torch.float64).sort(descending=True).values
    known = torch.tensor([30.0, 7.0, 0.0], dtype=torch.float64).view(3, 1, 1).expand(shape)
    exact = exact.masked_fill(torch.arange(30) >= known[..., None], 0)
    tokens = torch.tensor([1500.0, 90.0, 0.0], dtype=torch.float64).view(3, 1, 1).expand(shape)
    weights = torch.rand(2, *shape, generator=generator, dtype=torch.float64) * 0.1
    curve = Curve.through(1 + tokens * 0.1, weights[0], 2 + tokens * 0.6, weights[1])
    outside = torch.rand(shape, generator=generator, dtype=torch.float64)
    share = torch.tensor([0.9, 0.5, 0.7], dtype=torch.float64).view(3, 1, 1)

    counts = RankedMass(outside, exact.cumsum(-1), known, tokens, curve).tokens_for(share)

    for at in np.ndindex(shape):
        head_exact = exact[at][: int(known[at])].tolist()
        fitted = fitted_weights(head_exact, int(tokens[at]), float(curve.a[at]), float(curve.b[at]))
        assert int(counts[at]) == smallest_count(fitted, float(outside[at]), float(share[at[0]]))
