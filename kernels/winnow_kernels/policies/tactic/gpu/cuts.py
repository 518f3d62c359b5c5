"""How far down each query head takes clusters (``selection``)."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.decode.predicted_attention import FLOOR, STEPS
from winnow_kernels.kernel_arguments import Heads
from winnow_kernels.policies.tactic.gpu.contexts import (
    COUNTED,
    LOWEST_STEP,
    NOTHING,
    Row,
    addresses_of,
    is_idle,
    row_at,
)
from winnow_kernels.policies.tactic.gpu.state import SCORED, TAIL_SPLITS, WINDOW, Contexts, Cuts, Kept, Scored
from winnow_kernels.policies.tactic.parameters import WHOLE_ABOVE

WARPS: Final = 4
"""Of a program."""

_TAIL_SPLITS = tl.constexpr(TAIL_SPLITS)
_SCORED = tl.constexpr(SCORED)
_WINDOW = tl.constexpr(WINDOW)
_STEPS = tl.constexpr(STEPS)
_FLOOR = tl.constexpr(FLOOR)
_WHOLE_ABOVE = tl.constexpr(WHOLE_ABOVE)
# Clusters that are counted together.
_COUNTED_AT_ONCE = tl.constexpr(1024)


@triton.jit  # type: ignore[untyped-decorator]
def cut_kernel(
    contexts: Contexts,
    heads: Heads,
    scored: Scored,
    kept: Kept,
    cuts: Cuts,
) -> None:
    """Find the step down to which one query head takes clusters, and the mass of all tokens.

    Grid: (query heads, rows). The tokens of each step are counted already, unless tiles differ so much that steps
    which count are further apart than the counts reach.
    """
    head = tl.program_id(0)
    row = row_at(contexts, tl.program_id(1))
    if is_idle(row):
        return
    of_head = row.number.to(tl.int64) * (heads.kv_heads * heads.group) + head
    tile = tl.arange(0, scored.clusters // _SCORED)
    highest_ptr = scored.highest + of_head * (scored.clusters // _SCORED)
    of_tiles = tl.load(highest_ptr + tile, mask=tile * _SCORED < row.clusters, other=LOWEST_STEP)
    split = tl.arange(0, _TAIL_SPLITS)
    tails_ptr = kept.tails + (of_head * _TAIL_SPLITS + split) * 2
    largest, masses = tl.load(tails_ptr), tl.load(tails_ptr + 1)
    highest = tl.max(of_tiles, axis=0)
    lowest = tl.min(tl.where(of_tiles > LOWEST_STEP, of_tiles, highest), axis=0)
    tokens_ptr = scored.tokens + of_head * _WINDOW
    if highest - lowest > _WINDOW - COUNTED:
        _count(contexts, heads, scored, row, head, tokens_ptr, highest)
    # From the highest down; what is read is cleared for the next selection.
    step = highest - tl.arange(0, _WINDOW)
    counts_ptr = tokens_ptr + (step & (_WINDOW - 1))
    counts = tl.load(counts_ptr, cache_modifier=".cg")
    tl.store(counts_ptr, tl.zeros([_WINDOW], tl.int32))
    counts = tl.where(step > highest - COUNTED, counts, 0)
    # Of rows without clusters what is kept is all.
    unit = tl.maximum(
        tl.where(highest > LOWEST_STEP, highest.to(tl.float32) / _STEPS, NOTHING), tl.max(largest, axis=0)
    )
    of_kept = tl.sum((masses * tl.exp2(largest - unit)).to(tl.float64), axis=0)
    weights = tl.where(counts > 0, tl.exp2(step.to(tl.float32) / _STEPS - unit), 0.0)
    weights = weights.to(tl.float64) * counts.to(tl.float64)
    total = of_kept + tl.sum(weights, axis=0)
    logarithm = unit.to(tl.float64) + tl.log2(total)
    # What holds less than the floor weighs nothing.
    weights = tl.where(step.to(tl.float64) / _STEPS - logarithm < _FLOOR, 0.0, weights)
    missing = row.share * total - of_kept
    above = tl.cumsum(weights, axis=0) - weights
    taken = tl.sum((above < missing).to(tl.int32), axis=0)
    cut = tl.where((taken == _WINDOW) | (row.share > _WHOLE_ABOVE), LOWEST_STEP, highest - taken + 1)
    tl.store(cuts.cuts + of_head, cut)
    tl.store(cuts.totals + of_head, logarithm)
    tl.store(cuts.lost + of_head, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _count(
    contexts: Contexts,
    heads: Heads,
    scored: Scored,
    row: Row,
    head: tl.tensor,
    tokens_ptr: tl.tensor,
    highest: tl.tensor,
) -> None:
    """Count the tokens of each of a query head's steps that are not too far below its ``highest``."""
    tl.store(tokens_ptr + tl.arange(0, _WINDOW), tl.zeros([_WINDOW], tl.int32))
    tl.debug_barrier()
    kv_head = head // heads.group
    steps_ptr = scored.steps + (row.number.to(tl.int64) * (heads.kv_heads * heads.group) + head) * scored.clusters
    for begin in tl.range(0, row.clusters, _COUNTED_AT_ONCE, num_stages=1):
        number = begin + tl.max_contiguous(tl.arange(0, _COUNTED_AT_ONCE), 1)
        is_cluster = number < row.clusters
        step = tl.load(steps_ptr + number, mask=is_cluster, other=0).to(tl.int32)
        address = addresses_of(contexts, row, number, is_cluster, kv_head)
        size = tl.load(contexts.tables.sizes + address, mask=is_cluster, other=0).to(tl.int32)
        is_counted = (size > 0) & (step > highest - COUNTED)
        tl.atomic_add(tokens_ptr + (step & (_WINDOW - 1)), size, mask=is_counted, sem="relaxed")
    tl.debug_barrier()
