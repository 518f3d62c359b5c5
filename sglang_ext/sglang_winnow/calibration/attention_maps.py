"""Decoding with transformers while looking at the attention of every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from winnow_kernels.policies.delta.calibration import layer_coverage, token_scores

ATTENTION: Final = "winnow_calibration"
"""The attention implementation to load a model with."""

_scores: dict[int, Tensor] = {}


def decode_coverage(
    model: Any, prompt: Tensor, steps: int, end: frozenset[int], layers: Sequence[int]
) -> Iterator[Tensor]:
    """Decode greedily, and yield each step's coverage, float64 [len(layers), len(layers)] (``layer_coverage``).

    Args:
        model: a causal language model of transformers, loaded with the attention implementation ``ATTENTION``.
        prompt: int64 [tokens], on the model's device.
        steps: most decode steps; the token that the prefill gives is the first to be decoded.
        end: tokens that end the answer.
        layers: those to compare, ascending; each sees the whole context.
    """
    with torch.inference_mode(), _no_scores():
        output = model(prompt[None], use_cache=True, logits_to_keep=1)
        for _ in range(steps):
            token = int(output.logits[0, -1].argmax())
            if token in end:
                return
            _scores.clear()
            output = model(
                torch.tensor([[token]], device=prompt.device), past_key_values=output.past_key_values, use_cache=True
            )
            yield layer_coverage([_scores[layer] for layer in layers])


@contextmanager
def _no_scores() -> Iterator[None]:
    _scores.clear()
    try:
        yield
    finally:
        _scores.clear()


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as ``sdpa`` does; of a single query, note the tokens' scores too.

    Only one query's weights are computed: those of a whole prompt would need memory of the square of its length.
    """
    if query.shape[2] == 1:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        grouped = query[0, :, 0].float().view(key.shape[1], -1, query.shape[-1])
        weights = ((grouped @ key[0].float().mT) * scale).softmax(-1)
        _scores[module.layer_idx] = token_scores(weights.flatten(0, 1))  # type: ignore[index]
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    return output, None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
