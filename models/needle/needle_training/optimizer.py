"""Muon (Jordan et al., 2024) for the stacked matrices, AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


def orthogonalize(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly, by five Newton-Schulz steps in bfloat16.

    Args:
        matrices: [stack, rows, columns].
    """
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized per matrix and scaled to the update size of AdamW (Liu et al., 2025: 0.2 √max(m, n))."""

    def __init__(self, params: ParamsT, lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every stack [layers, rows, columns] from its gradient."""
        for group in self.param_groups:
            for weight in _with_gradient(group["params"]):
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                momentum: Tensor = state["momentum"]
                assert weight.grad is not None
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalize(weight.grad.lerp(momentum, group["momentum"]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(weight.shape[-2:])))


def _with_gradient(params: Iterable[Tensor]) -> Iterable[Tensor]:
    return (weight for weight in params if weight.grad is not None)
