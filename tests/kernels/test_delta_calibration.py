"""The choice of Δ-layers: coverage against a plain version, the best choice against all choices."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from winnow_kernels.policies.delta.calibration import (
    MeanCoverage,
    choose_delta_layers,
    covered,
    layer_coverage,
    token_scores,
)

PAGE = 16


def _plain_coverage(scores: list[list[float]]) -> list[list[float]]:
    tokens = len(scores[0])
    pages = [range(start, min(start + PAGE, tokens)) for start in range(0, tokens, PAGE)]

    def of_pages(layer: list[float]) -> list[float]:
        return [sum(layer[token] for token in page) for page in pages]

    def selected(layer: list[float]) -> set[int]:
        kept = {0, len(pages) - 1}
        by_score = sorted(set(range(len(pages))) - kept, key=lambda page: of_pages(layer)[page], reverse=True)
        return kept | set(by_score[: max(-(-(tokens // 8) // PAGE), 2) - 2])

    return [
        [sum(of_pages(other)[page] for page in selected(layer)) / sum(other) for other in scores] for layer in scores
    ]


@pytest.mark.parametrize("tokens", [1000, 992, 40])
def test_coverage_equals_the_plain_version(tokens: int) -> None:
    rng = random.Random(0)
    weights = [[[rng.random() ** 8 for _ in range(tokens)] for _ in range(4)] for _ in range(6)]
    scores = [token_scores(torch.tensor(layer)) for layer in weights]
    plain = [[max(head[token] for head in layer) for token in range(tokens)] for layer in weights]
    for ours, theirs in zip(scores, plain, strict=True):
        torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), atol=1e-6, rtol=0)
    expected = torch.tensor(_plain_coverage(plain), dtype=torch.float64)
    torch.testing.assert_close(layer_coverage(scores), expected, atol=1e-6, rtol=0)


def test_the_mean_is_over_all_steps() -> None:
    coverage = MeanCoverage()
    with pytest.raises(ValueError, match="no decode step"):
        coverage.mean()
    for step in (0.0, 0.3, 0.9):
        coverage.add(torch.full((2, 2), step, dtype=torch.float64))
    assert coverage.steps == 3
    torch.testing.assert_close(coverage.mean(), torch.full((2, 2), 0.4, dtype=torch.float64))


def test_the_layer_that_looks_things_up_is_chosen() -> None:
    coverage = torch.full((12, 12), 0.5, dtype=torch.float64)
    # What layers from 7 on look up, layers before do not select.
    coverage[:7, 7:] = 0.1
    assert choose_delta_layers(coverage, full_layers=2, count=2) == (2, 7)
    assert covered(coverage, (2, 7)) == [1, 1, 1, *[0.5] * 4, 1, *[0.5] * 4]


@st.composite
def coverages(draw: st.DrawFn) -> Tensor:
    layers = draw(st.integers(1, 9))
    shares = st.lists(st.floats(0, 1), min_size=layers, max_size=layers)
    return torch.tensor(draw(st.lists(shares, min_size=layers, max_size=layers)), dtype=torch.float64)


@given(coverages(), st.integers(0, 5), st.integers(1, 5))
def test_no_other_choice_covers_more(coverage: Tensor, full_layers: int, count: int) -> None:
    layers = len(coverage)
    if full_layers >= layers:
        with pytest.raises(ValueError, match="full_layers"):
            choose_delta_layers(coverage, full_layers, count)
        return
    chosen = choose_delta_layers(coverage, full_layers, count)
    assert chosen[0] == full_layers
    assert list(chosen) == sorted(set(chosen))
    assert len(chosen) == min(count, layers - full_layers)
    others = itertools.combinations(range(full_layers + 1, layers), len(chosen) - 1)
    most = max(sum(covered(coverage, (full_layers, *other))) for other in others)
    assert sum(covered(coverage, chosen)) == pytest.approx(most)
