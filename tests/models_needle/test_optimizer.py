"""Muon's orthogonalization and the size of its steps."""

from __future__ import annotations

import pytest
import torch

from needle_training.optimizer import Muon, orthogonalize


def _with_singular_values(rows: int, columns: int, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Three matrices with singular values from ``least`` to 1, and the semi-orthogonal ones nearest to them."""
    torch.manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(3, rows, columns), full_matrices=False)
    values = torch.linspace(least, 1, min(rows, columns))
    return u @ torch.diag(values) @ vh, u @ vh


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (32, 96), (96, 32)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_singular_values_come_near_one_and_directions_stay(rows: int, columns: int, scale: float) -> None:
    matrices, nearest = _with_singular_values(rows, columns, least=0.1)
    result = orthogonalize(matrices * scale).float()
    assert result.shape == matrices.shape
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.5
    assert values.max() < 1.5
    cosine = torch.cosine_similarity(result.flatten(1), nearest.flatten(1))
    assert cosine.min() > 0.95


def test_each_matrix_of_a_stack_is_its_own() -> None:
    matrices, _ = _with_singular_values(48, 48, least=0.2)
    together = orthogonalize(matrices)
    for one, alone in zip(together, matrices, strict=True):
        torch.testing.assert_close(one, orthogonalize(alone[None])[0], atol=0.02, rtol=0.02)


def test_a_step_is_as_large_as_one_of_adamw() -> None:
    matrices, nearest = _with_singular_values(64, 128, least=0.1)
    weight = torch.nn.Parameter(torch.zeros_like(matrices))
    weight.grad = matrices
    Muon([weight], lr=0.01, weight_decay=0.0).step()
    size = weight.detach().square().mean().sqrt().item()
    assert 0.14 * 0.01 < size < 0.26 * 0.01
    # Against the gradient.
    assert torch.cosine_similarity(weight.detach().flatten(1), -nearest.flatten(1)).min() > 0.9


def test_weights_decay_by_rate_and_share() -> None:
    weight = torch.nn.Parameter(torch.ones(1, 8, 8))
    weight.grad = torch.zeros(1, 8, 8)
    Muon([weight], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(weight.detach(), torch.full((1, 8, 8), 0.95))


def test_a_weight_without_gradient_stays() -> None:
    weight = torch.nn.Parameter(torch.ones(1, 8, 8))
    Muon([weight], lr=0.1).step()
    assert (weight == 1).all()
