"""PyramidKV (Cai et al., arXiv 2406.02069, section 4): SnapKV with budgets that shrink from layer to layer.

With m layers, a mean of B tokens a layer beside the observation window and the sinks, and β = 20, the budgets fall in
equal steps from the first layer, 2 B − B / β, to the last, B / β; window and sinks (the paper has none) come on top in
each. So the mean over layers, all included, is the ``budget``. If the first layer would keep more than the prompt has,
it keeps all of it and the last layer as much more as keeps the mean. (The authors' code bounds its budgets so too, but
keeps equal budgets where the prompt is shorter than 2 B.) Fractions of a token are dealt out so that the sum over
layers is exact. Layers that see a sliding window only are not among the m.

A request that keeps its prompt so is decoded by ``SnapKVStep``, beside those that keep it by SnapKV's rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from winnow_kernels.policies.snapkv.observation import ObservationBuffer
from winnow_kernels.policies.snapkv.parameters import Voted
from winnow_kernels.policies.snapkv.reference import SnapKVState

BETA = 20


def pyramid(layers: int, mean: int, most: int) -> list[int]:
    """Return the tokens that each layer keeps for their votes; their mean is ``mean``.

    Args:
        layers: how many, at least 1.
        mean: tokens a layer, from 0 to ``most``.
        most: tokens that a layer can keep.
    """
    first = min(2 * mean - mean / BETA, most)
    step = 2 * (first - mean) / max(1, layers - 1)
    # Cumulative sums rounded to integers: each layer is off by less than a token, and the total by none.
    ends = [round(layer * first - layer * (layer - 1) / 2 * step) for layer in range(layers)] + [layers * mean]
    return [after - before for before, after in pairwise(ends)]


class PyramidKVState(SnapKVState):
    """What one request keeps of its prompt; its ``budget`` is the mean over ``layers``, of which it has the numbers."""

    def __init__(self, parameters: Voted, observation: ObservationBuffer, layers: Sequence[int]) -> None:
        if not layers:
            raise ValueError("layers: must be at least one")
        super().__init__(parameters, observation)
        self._layers = layers

    def layer_votes(self, layer: int) -> int:
        voted_on = max(0, self.prompt_length - self.observation.window - self.parameters.sinks)
        return pyramid(len(self._layers), super().layer_votes(layer), voted_on)[self._layers.index(layer)]
