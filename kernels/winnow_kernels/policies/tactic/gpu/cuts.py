"""How far down each query head takes clusters (``selection``)."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.decode.predicted_attention import FLOOR, STEPS
from winnow_kernels.kernel_arguments import Heads
from winnow_kernels.policies.tactic.gpu.contexts import NOTHING, is_idle, row_at
from winnow_kernels.policies.tactic.gpu.state import TAIL_SPLITS, Contexts, Cuts, Kept, Scored
from winnow_kernels.policies.tactic.parameters import WHOLE_ABOVE

CLUSTERS_OF_THREAD: Final = 16
"""Clusters that a thread holds, if there are threads enough."""

_TAIL_SPLITS = tl.constexpr(TAIL_SPLITS)
_STEPS = tl.constexpr(STEPS)
_FLOOR = tl.constexpr(FLOOR)
_WHOLE_ABOVE = tl.constexpr(WHOLE_ABOVE)
# From the highest step down to this one, all clusters that weigh anything.
_COUNTED = tl.constexpr(-FLOOR * STEPS)
_HALVINGS = tl.constexpr((-FLOOR * STEPS + 1).bit_length())
_LOWEST = tl.constexpr(-(2**30))


@triton.jit  # type: ignore[untyped-decorator]
def cut_kernel(
    contexts: Contexts,
    heads: Heads,
    scored: Scored,
    kept: Kept,
    cuts: Cuts,
    block: tl.constexpr,
    fewest: tl.constexpr,
) -> None:
    """Find the step down to which one query head takes clusters, and the mass of all tokens.

    Grid: (query heads, rows). A program has rows of more than ``fewest`` and at most ``block`` clusters.
    """
    head = tl.program_id(0)
    row = row_at(contexts, tl.program_id(1))
    if is_idle(row) | (row.clusters <= fewest) | (row.clusters > block):
        return
    of_head = row.number.to(tl.int64) * (heads.kv_heads * heads.group) + head
    of_kv_head = row.number.to(tl.int64) * heads.kv_heads + head // heads.group
    number = tl.arange(0, block)
    is_cluster = number < row.clusters
    sizes = tl.load(scored.sizes + of_kv_head * scored.clusters + number, mask=is_cluster, other=0)
    steps = tl.load(scored.steps + of_head * scored.clusters + number, mask=is_cluster, other=_LOWEST)
    steps = tl.where(sizes > 0, steps, _LOWEST)
    split = tl.arange(0, _TAIL_SPLITS)
    tails_ptr = kept.tails + (of_head * _TAIL_SPLITS + split) * 2
    largest, masses = tl.load(tails_ptr), tl.load(tails_ptr + 1)
    highest = tl.max(steps, axis=0)
    # Of rows without clusters what is kept is all.
    unit = tl.maximum(tl.where(highest > _LOWEST, highest.to(tl.float32) / _STEPS, NOTHING), tl.max(largest, axis=0))
    of_kept = tl.sum((masses * tl.exp2(largest - unit)).to(tl.float64), axis=0)
    weights = tl.where(sizes > 0, tl.exp2(tl.maximum(steps, _LOWEST // 2).to(tl.float32) / _STEPS - unit), 0.0)
    weights = weights.to(tl.float64) * sizes.to(tl.float64)
    total = of_kept + tl.sum(weights, axis=0)
    logarithm = unit.to(tl.float64) + tl.log2(total)
    # What holds less than the floor weighs nothing.
    weights = tl.where(steps.to(tl.float64) / _STEPS - logarithm < _FLOOR, 0.0, weights)
    missing = row.share * total - of_kept
    low, high = highest - _COUNTED, highest + 1
    is_enough = tl.sum(tl.where(steps >= low, weights, 0.0), axis=0) >= missing
    for _ in tl.static_range(_HALVINGS):
        middle = (low + high) >> 1
        reaches = tl.sum(tl.where(steps >= middle, weights, 0.0), axis=0) >= missing
        low, high = tl.where(reaches, middle, low), tl.where(reaches, high, middle)
    cut = tl.where(is_enough, low, _LOWEST)
    cut = tl.where(missing > 0, cut, -_LOWEST)
    tl.store(cuts.cuts + of_head, tl.where(row.share > _WHOLE_ABOVE, _LOWEST, cut))
    tl.store(cuts.totals + of_head, logarithm)
    tl.store(cuts.lost + of_head, 0.0)
