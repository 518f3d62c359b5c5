"""Which layers of a model should be Δ-layers (DELTA, section 5.1 and Appendix D).

The shift into a layer is the mean, over decode steps and samples, of 1 − cosine similarity between its attention and
that of the layer before. Attention is taken as DELTA uses it to select: for each token the greatest weight that any
query head gives it. The paper's appendix compares the heads' maps one by one; but a head has no counterpart of the
same number in the next layer, so that such a shift tells apart layers that would select the same tokens.

The first Δ-layer is the first that is not always dense. The others are those with the largest shifts that lie at
least a minimum distance from all that were chosen before. The distance is a twelfth of the depth and at least 2: the
widest that admits all of the paper's own choices ([2, 6, 42] of 48 layers has the closest pair).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

DELTA_LAYERS = 3


def token_scores(weights: Tensor) -> Tensor:
    """Return the maximum over heads of attention weights [query heads, tokens], as float64 [tokens]."""
    return weights.amax(0).double()


def layer_shifts(scores: Sequence[Tensor]) -> Tensor:
    """Return the shifts of one decode step.

    Args:
        scores: of each layer, float [tokens].

    Returns:
        float64 [layers]; the first is 0, for no layer is before it.
    """
    stacked = torch.stack(list(scores)).double()
    shifts = 1 - F.cosine_similarity(stacked[1:], stacked[:-1], dim=-1)
    return F.pad(shifts, (1, 0))


class MeanShifts:
    """The mean shifts of many decode steps.

    Attributes:
        steps: how many there were.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._sum: Tensor | None = None

    def add(self, shifts: Tensor) -> None:
        """Count one step's shifts, float [layers]."""
        self._sum = shifts if self._sum is None else self._sum + shifts
        self.steps += 1

    def mean(self) -> list[float]:
        """Return the mean shift into each layer.

        Raises:
            ValueError: there were no steps.
        """
        if self._sum is None:
            raise ValueError("no decode step was observed")
        mean: list[float] = (self._sum / self.steps).tolist()
        return mean


def minimum_distance(layers: int) -> int:
    """Return how far apart the Δ-layers of a model of ``layers`` layers lie at least."""
    return max(2, layers // 12)


def choose_delta_layers(shifts: Sequence[float], full_layers: int, count: int = DELTA_LAYERS) -> tuple[int, ...]:
    """Choose the Δ-layers, ascending: ``full_layers`` itself and then the largest shifts, well apart.

    Args:
        shifts: the mean shift into each layer.
        full_layers: how many of the first layers are always dense.
        count: how many Δ-layers; fewer if the model has no room for them.

    Raises:
        ValueError: the model has no layer beyond the full ones.
    """
    layers = len(shifts)
    if full_layers >= layers:
        raise ValueError(f"full_layers: must be less than the model's {layers} layers; it is {full_layers}")
    chosen = [full_layers]
    by_shift = sorted(range(full_layers, layers), key=lambda layer: shifts[layer], reverse=True)
    for layer in by_shift:
        if len(chosen) == count:
            break
        if all(abs(layer - other) >= minimum_distance(layers) for other in chosen):
            chosen.append(layer)
    return tuple(sorted(chosen))
