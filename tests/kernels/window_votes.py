"""The votes of an observation window, one query and head at a time, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.attention_float64 import scores_of_head
from winnow_kernels.cache import LayerCache


def window_votes(queries: Tensor, slots: Tensor, cache: LayerCache, window: int, scale: float) -> Tensor:
    """Votes for the tokens before the window, [KV heads, prompt − window].

    ``queries`` are the whole prompt's, [prompt, query heads, head dim]; ``slots`` are where its tokens lie.
    """
    prompt, query_heads = queries.shape[:2]
    group = query_heads // cache.kv_heads
    window = min(window, prompt)
    votes = torch.zeros(cache.kv_heads, prompt - window, dtype=torch.float64)
    for position in range(prompt - window, prompt):
        for query_head in range(query_heads):
            head = query_head // group
            keys = cache.keys[slots[: position + 1], head]
            query = queries[position, query_head][None]
            weights = scores_of_head(query, keys, scale, cache.softmax.cap)[0].softmax(0)
            votes[head] += weights[: prompt - window] / group
    return votes


def pooled(votes: Tensor, kernel_size: int) -> Tensor:
    """The maximum of each vote and of those up to half a kernel away."""
    reach = kernel_size // 2
    columns = [votes[:, max(0, at - reach) : at + reach + 1].amax(1) for at in range(votes.shape[1])]
    return torch.stack(columns, dim=1) if columns else votes
