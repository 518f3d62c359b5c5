"""A model's dense forward pass over a text, for what its attention meets on the way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from winnow_evaluation.offline_model import OfflineModel
from winnow_kernels.attend.dense import prefill
from winnow_kernels.cache import LayerCache

Note = Callable[[int, Tensor, Tensor, Tensor, float], None]
"""Called with a layer's number, its rotated queries [tokens, query heads, head dim], its rotated keys and its values
[tokens, KV heads, head dim], all in the model's dtype, and the scale of scores."""


def run_densely(model: OfflineModel, tokens: list[int], note: Note) -> None:
    """Run a model over ``tokens`` with dense attention; ``note`` is told of each layer in turn."""
    positions = torch.arange(len(tokens), device=model.device)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        note(layer, queries[0], keys[0], values[0], scale)
        return prefill(queries[0], positions, LayerCache(keys[0].contiguous(), values[0].contiguous()), scale)[None]

    with torch.inference_mode():
        model.hidden(torch.tensor([tokens], device=model.device), positions[None], attend)
