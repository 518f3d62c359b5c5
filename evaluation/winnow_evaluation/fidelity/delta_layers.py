"""Δ-layers for a model that has no profile: chosen by one prompt's continuation, as ``winnow calibrate delta`` does."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow_evaluation.fidelity.exact import Following, Scores
from winnow_evaluation.fidelity.forcing import Forcing
from winnow_evaluation.fidelity.passes import ExactPass
from winnow_evaluation.fidelity.prefilled import PrefilledBatch
from winnow_evaluation.fidelity.prompts import Continued
from winnow_evaluation.offline_model import OfflineModel
from winnow_kernels.policies.delta.calibration import MeanCoverage, choose_delta_layers, layer_coverage


def calibrated_layers(model: OfflineModel, prompt: Continued, full_layers: int, memory: int) -> tuple[int, ...]:
    """Return the Δ-layers by the attention of what follows a prompt.

    Args:
        model: whose they are.
        prompt: and what follows it.
        full_layers: how many of the first layers are dense in any case.
        memory: as for ``Forcing``.

    Raises:
        ValueError: the model has too few layers.
    """
    fed = prompt.following[:-1]
    batch = PrefilledBatch(model, [prompt.tokens], len(fed))
    scores: list[Tensor] = []
    forcing = Forcing(batch, torch.tensor([fed], device=model.device), memory)
    forcing.run(lambda following: _ScoringPass(following, scores))
    coverage = MeanCoverage()
    for of_token in zip(*scores, strict=True):
        coverage.add(layer_coverage(of_token))
    seeing = model.full_layers
    chosen = choose_delta_layers(coverage.mean(), sum(layer < full_layers for layer in seeing))
    return tuple(seeing[layer] for layer in chosen)


class _ScoringPass(ExactPass):
    """Attend to everything, and note the tokens' scores in each layer: [tokens, context] of the only prompt."""

    def __init__(self, following: Following, scores: list[Tensor]) -> None:
        super().__init__(following)
        self._scores = scores

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        weights = Scores.of(self.following, layer, queries, slice(0, 1)).weights()
        self._scores.append(weights[0].amax((0, 2)).cpu())
        return super().attend(layer, queries)
