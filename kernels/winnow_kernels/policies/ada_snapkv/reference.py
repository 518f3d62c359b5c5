"""Ada-SnapKV (Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation", arXiv 2407.11550).

SnapKV's votes, dealt out by layer: the KV heads of a layer have one budget together, and it goes to the highest votes
of all of them. A head whose attention is concentrated keeps few tokens, one whose attention is spread out many. The
paper mixes this with an even split, α of that, so that no head is left with nothing; here every head first keeps the
``floor`` of an even split, and the highest votes of all heads share the rest, so that no token of the budget is lost to
rounding. Window and sinks are every head's.

With tensor parallelism the KV heads of each rank share.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from winnow_kernels.policies.ada_snapkv.parameters import AdaSnapKV
from winnow_kernels.policies.snapkv.observation import ObservationBuffer
from winnow_kernels.policies.snapkv.reference import SnapKVState


def shared_counts(votes: Tensor, mean: int, floor: float) -> Tensor:
    """Return how many tokens each KV head keeps for their votes.

    Args:
        votes: float [KV heads, tokens], each head's in descending order.
        mean: tokens a head, at most as many as there are.
        floor: share of the mean that each head keeps at least.

    Returns:
        int64 [KV heads]; ``mean`` times the heads in total. Of equal votes the first head's count first.
    """
    heads = len(votes)
    least = math.floor(floor * mean)
    others = votes[:, least:]
    chosen = others.flatten().sort(descending=True, stable=True).indices[: heads * (mean - least)]
    return least + torch.bincount(chosen // max(1, others.shape[1]), minlength=heads)


class AdaSnapKVState(SnapKVState):
    """What one request keeps of its prompt: in each layer as much as by SnapKV, dealt out to KV heads by votes."""

    def __init__(self, parameters: AdaSnapKV, observation: ObservationBuffer) -> None:
        super().__init__(parameters, observation)
        self._floor = parameters.floor
        self._counts: dict[int, Tensor] = {}

    def keep(self, layer: int, votes: Tensor) -> None:
        sinks = min(self.parameters.sinks, votes.shape[1])
        ordered = votes[:, sinks:].sort(dim=-1, descending=True, stable=True).values
        counts = shared_counts(ordered, self.layer_votes(layer), self._floor)
        self._counts[layer] = counts + self.observation.window + sinks
        self.keep_most(layer, votes, int(counts.max()))

    def counts(self, layer: int) -> Tensor:
        return self._counts[layer]
