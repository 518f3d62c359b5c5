"""Makes the query heads of a group look for similar things, as those of a trained model do.

Heads with random weights rank keys each in its own way: the union over a group is nearly as large as all that its
heads take together. Here they have a part of their weights in common, so that their scores are correlated.
"""

from __future__ import annotations

import logging

import torch
from sglang.srt.layers.linear import QKVParallelLinear
from torch import Tensor, nn

logger = logging.getLogger(__name__)


def make_heads_alike(model: nn.Module, correlation: float) -> None:
    """Give the queries of each group ``correlation``, in all layers of a model of SGLang's with random weights."""
    layers = [module for module in model.modules() if isinstance(module, QKVParallelLinear)]
    for number, layer in enumerate(layers):
        for parameter in (layer.weight, layer.bias):
            if parameter is not None:
                of_queries = parameter.data[: layer.num_heads * layer.head_size]
                blend(of_queries, layer.num_kv_heads, layer.num_heads // layer.num_kv_heads, correlation, number)
    logger.warning(
        "Query heads of a group are made alike in %d layers: their scores have the correlation %.3f",
        len(layers),
        correlation,
    )


def blend(of_queries: Tensor, kv_heads: int, group: int, correlation: float, seed: int) -> None:
    """Make rows of weights alike in each group, in place; what they are of is as large as before, on average.

    Args:
        of_queries: [KV heads × group × head dim, ...]; independent, around 0.
        kv_heads: groups.
        group: query heads of a KV head.
        correlation: between rows of the same number in the heads of a group; 0 to 1.
        seed: of what they have in common.
    """
    if group == 1:
        return
    grouped = of_queries.view(kv_heads, group, -1)
    own = grouped.float()
    generator = torch.Generator(own.device).manual_seed(seed)
    common = torch.randn(own[:, :1].shape, generator=generator, device=own.device) * own.std()
    grouped.copy_(correlation**0.5 * common + (1 - correlation) ** 0.5 * own)
