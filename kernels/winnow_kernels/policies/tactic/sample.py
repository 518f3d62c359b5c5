"""Which tokens are sampled of what is not selected: by numbers that look random, but follow from what they are for.

The same cluster of the same KV head gets the same numbers at the same length of a context, whatever it is batched with
and wherever it is computed. All arithmetic is that of 32-bit integers without a sign.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

SAMPLED: Final = 512
"""Tokens that are sampled for a KV head, at most, beside one more a cluster where chance will have it."""
UNIFORM_BITS: Final = 24
FACTORS: Final = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
"""What a cluster's number, a KV head's and a context's length are multiplied by."""
MIXERS: Final = (0x2C1B3C6D, 0x297A2D39)
_MASK: Final = 2**32 - 1


def chances(clusters: int, kv_heads: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two independent numbers for each cluster of each KV head.

    Args:
        clusters: of a request.
        kv_heads: of a layer.
        length: of the context.
        device: where.

    Returns:
        Both [KV heads, clusters]: float32, evenly spread from 0 to below 1; int64, from 0 to below 2^16.
    """
    of_cluster, of_head, of_length = FACTORS
    mixed = torch.arange(clusters, device=device) * of_cluster & _MASK
    mixed = mixed ^ (torch.arange(kv_heads, device=device)[:, None] * of_head & _MASK) ^ (length * of_length & _MASK)
    for shift, factor in zip((15, 12), MIXERS, strict=True):
        mixed = (mixed ^ mixed >> shift) * factor & _MASK
    mixed = mixed ^ mixed >> 15
    second = (mixed * of_cluster & _MASK) >> 16
    return (mixed >> 32 - UNIFORM_BITS).float() * 2.0**-UNIFORM_BITS, second


def expected_samples(shares: Tensor, sizes: Tensor, p: float) -> Tensor:
    """Return how many tokens of each cluster are sampled on average, float64 [KV heads, clusters].

    Args:
        shares: float64 [KV heads, clusters]; of the mass, that a cluster is predicted to hold, mean over the group.
        sizes: int64, same shape; a cluster's members, which are no less than that.
        p: the share that is asked for: clusters that are not selected hold at most the rest.
    """
    return (shares * (SAMPLED / (1 - p))).minimum(sizes.double())
