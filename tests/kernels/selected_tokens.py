"""Checks that the tests of several policies share: a selection by positions, and what attending to it should give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.kernels.attention_float64 import attend_head
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.selection.tokens import Selection


def positions_of(selection: Selection, context: Context, request: int, head: int) -> list[int]:
    """The positions of a selection's tokens, in its order; a token that is not of the request's context fails."""
    table = context.slots[request, : int(context.lengths[request])].tolist()
    position = {slot: number for number, slot in enumerate(table)}
    count = int(selection.counts[request, head])
    positions = [position[slot] for slot in selection.slots[request, head, :count].tolist()]
    assert len(set(positions)) == len(positions) >= 1
    return positions


def dense_output(queries: Tensor, context: Context, cache: LayerCache, scale: float) -> Tensor:
    """Attention over whole contexts in float64: [requests, query heads, head dim]."""
    everything = [[range(int(length))] * cache.kv_heads for length in context.lengths]
    return output_over(queries, context, cache, scale, everything)


def output_over(
    queries: Tensor, context: Context, cache: LayerCache, scale: float, positions: Sequence[Sequence[Sequence[int]]]
) -> Tensor:
    """Attention in float64 over the positions that each request and KV head reads."""
    size, sinks = queries.shape[1] // cache.kv_heads, cache.softmax.sink_logits
    outputs = torch.empty(queries.shape, dtype=torch.float64)
    for request, of_heads in enumerate(positions):
        for head, own in enumerate(of_heads):
            slots = context.slots[request, list(own)]
            heads = slice(head * size, (head + 1) * size)
            outputs[request, heads] = attend_head(
                queries[request, heads],
                cache.keys[slots, head],
                cache.values[slots, head],
                scale,
                cache.softmax.cap,
                None if sinks is None else sinks[heads],
            )[0]
    return outputs
