"""QUOKA's Algorithms 1 and 2 in float64, one block, head and query at a time: what the reference is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.kernels.attention_float64 import attend_head
from winnow_kernels.cache import LayerCache


@dataclass
class PlainPrefill:
    """Attributes: outputs [new tokens, query heads, head dim]; the rest by block start."""

    outputs: Tensor
    scores: dict[int, Tensor] = field(default_factory=dict)  # [KV heads, tokens before]
    selected: dict[int, list[set[int]]] = field(default_factory=dict)
    attended: int = 0
    context: int = 0
    read_bytes: int = 0
    context_bytes: int = 0


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def plain_scores(queries: Tensor, keys: Tensor, kept: int) -> list[float]:
    """Score keys [tokens, head dim] by a group's queries of a block, [group, rows, head dim]."""
    positions = list(range(queries.shape[1]))
    if len(positions) > kept:
        means = [of_head.mean(0) for of_head in queries]
        likeness = [
            sum(cosine(of_head[position], mean) for of_head, mean in zip(queries, means, strict=True))
            for position in positions
        ]
        positions = sorted(positions, key=likeness.__getitem__)[:kept]
    means = [torch.stack([of_head[p] / of_head[p].norm() for of_head in queries]).mean(0) for p in positions]
    return [max(float(mean @ key / key.norm()) for mean in means) for key in keys]


def plain_prefill(
    queries: Tensor,
    slots: list[int],
    cache: LayerCache,
    scale: float,
    *,
    budget: int | None = None,
    budget_ratio: float | None = None,
    block: int,
    kept: int,
    dense_prefix: int = 0,
    sinks: int = 0,
    recency_ratio: float = 0.0,
) -> PlainPrefill:
    group, vector = queries.shape[1] // cache.kv_heads, cache.vector_bytes
    result = PlainPrefill(torch.zeros(queries.shape, dtype=torch.float64))
    prefix = len(slots) - len(queries)
    queries, sink_logits = queries.double(), cache.softmax.sink_logits
    for start in range(0, len(slots), block):
        end, begin = min(start + block, len(slots)), max(start, prefix)
        if begin >= end:
            continue
        allowed = budget if budget is not None else math.ceil((budget_ratio or 0.0) * start)
        allowed = max(allowed, sinks)
        recent = min(int(recency_ratio * allowed), allowed - sinks)
        is_dense = start <= allowed or start < dense_prefix
        result.selected[start] = []
        of_heads = []
        for head in range(cache.kv_heads):
            heads = slice(head * group, (head + 1) * group)
            of_block = queries[begin - prefix : end - prefix, heads].transpose(0, 1)
            seen = list(range(start))
            if not is_dense:
                scores = plain_scores(of_block, cache.keys[slots[:start], head].double(), kept)
                always = [*range(sinks), *range(start - recent, start)]
                others = sorted(range(sinks, start - recent), key=lambda token: -scores[token])
                seen = [*always, *others[: allowed - len(always)]]
                of_heads.append(torch.tensor(scores))
                result.selected[start].append(set(seen))
                result.read_bytes += start * (vector + 4)
            result.read_bytes += (len(seen) + end - start) * 2 * vector
            result.context_bytes += end * 2 * vector
            for position in range(begin, end):
                visible = [slots[token] for token in [*seen, *range(start, position + 1)]]
                row = position - prefix
                result.outputs[row, heads], _ = attend_head(
                    queries[row, heads],
                    cache.keys[visible, head],
                    cache.values[visible, head],
                    scale,
                    cache.softmax.cap,
                    None if sink_logits is None else sink_logits[heads],
                )
                result.attended += len(visible)
                result.context += position + 1
        if of_heads:
            result.scores[start] = torch.stack(of_heads)
        else:
            del result.selected[start]
    return result
