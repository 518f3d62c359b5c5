"""The order in which clusters are read (``winnow_kernels.gpu.tactic``): a counting sort of those that are listed.

Only early termination and a cap that cuts need an order. The listed clusters of a row and KV head are dealt out by runs
of ``RUN`` consecutive ones, whichever slices they are in, so that no program has many more than another.

    1. step   of each cluster the step of its best place, and its place in its run; of each run its tokens by step
    2. place  to that is added what comes before the cluster of all other runs

A cluster costs 20 bytes beside 4 for each query head, comparisons with ``RUN`` others and ``PLACE_STEPS`` steps, and
then a number for each run: 47 for the 3,000 clusters that 12 % of 128K tokens bring. All of it lies in the L2 cache.
What takes time are two launches, each with some loads that wait for each other and sums over a block.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.gpu.tactic_state import (
    CUT_KEY,
    CUT_LAST,
    CUT_TOKENS,
    CUTS,
    RUN,
    SLICE,
    is_idle,
    needs_order,
    shape_of,
    through,
    united,
)
from winnow_kernels.gpu.threshold import HIGHEST, count_of, ordered, score_of
from winnow_kernels.tactic import FIRST_OCTAVE, OCTAVE_BITS, PLACE_STEPS

SPLITS: Final = 16
"""Programs among which the listed clusters of a row and KV head are dealt out."""

_SLICE = tl.constexpr(SLICE)
_RUN = tl.constexpr(RUN)
_STEPS = tl.constexpr(PLACE_STEPS)
_STEPS_OF_OCTAVE = tl.constexpr(2**OCTAVE_BITS)
_FRACTION_BITS = tl.constexpr(23 - OCTAVE_BITS)
_FIRST_STEP = tl.constexpr((127 + FIRST_OCTAVE) << OCTAVE_BITS)
# Steps whose sums a run has at a time: of more, they find no room in registers.
_SUMMED = tl.constexpr(32)
# Clusters whose places are found at a time, and of how many runs they look at the sums.
_PLACED, _OTHERS = tl.constexpr(128), tl.constexpr(8)


@triton.jit  # type: ignore[untyped-decorator]
def step_kernel(
    lengths_ptr: tl.tensor,
    clustered_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    caps_ptr: tl.tensor,
    ordered_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    cuts_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    needed_ptr: tl.tensor,
    placed_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    step_sums_ptr: tl.tensor,
    places_ptr: tl.tensor,
    scale_log2: tl.tensor,
    clusters: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    group_block: tl.constexpr,
    span: tl.constexpr,
    of_span: tl.constexpr,
) -> None:
    """Find the steps of the listed clusters' best places, and put the clusters of each run in order."""
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share, cap = tl.load(shares_ptr + row), tl.load(caps_ptr + row)
    length, _, clustered, count = shape_of(lengths_ptr, clustered_ptr, sinks_ptr, row, span, of_span)
    is_ordered = tl.load(ordered_ptr + row)
    of_kv_head = row.to(tl.int64) * kv_heads + kv_head
    if is_idle(share, length, clustered, cap):
        tl.store(placed_ptr + of_kv_head, 0)
        return
    heads = tl.arange(0, group_block)
    of_heads = of_kv_head * group + heads
    cut_key = tl.load(cuts_ptr + of_heads * CUTS + CUT_KEY, mask=heads < group, other=HIGHEST)
    cut_last = tl.load(cuts_ptr + of_heads * CUTS + CUT_LAST, mask=heads < group, other=-1)
    cut_tokens = tl.load(cuts_ptr + of_heads * CUTS + CUT_TOKENS, mask=heads < group, other=0)
    slices: tl.constexpr = clusters // _SLICE
    totals_ptr += of_kv_head * slices
    totals, _, taken, wanted = united(totals_ptr, length, clustered, count, cap, slices)
    counts = count_of(totals)
    listed = tl.where(needs_order(taken, wanted, is_ordered), tl.sum(counts, axis=0), 0)
    tl.store(placed_ptr + of_kv_head, listed)
    if part * _RUN >= listed:
        return
    slice_ends = tl.cumsum(counts, axis=0)
    scores_ptr += of_heads[:, None] * clusters
    lists = of_kv_head * clusters
    here = tl.arange(0, _RUN)
    for begin in range(part * _RUN, listed, tl.num_programs(0) * _RUN):
        is_listed = begin + here < listed
        # Each slice has a list of its own. Those of a run lie in a few.
        at = here * 0
        slice_number = tl.sum((slice_ends <= begin).to(tl.int32), axis=0)
        start = tl.sum(tl.where(slice_ends <= begin, counts, 0), axis=0)
        while start < tl.minimum(begin + _RUN, listed):
            at = tl.where(begin + here >= start, slice_number * _SLICE + begin + here - start, at)
            start += count_of(tl.load(totals_ptr + slice_number))
            slice_number += 1
        number = tl.load(listed_ptr + lists + at, mask=is_listed, other=0)
        needed = tl.load(needed_ptr + lists + at, mask=is_listed, other=0)
        is_score = (heads < group)[:, None] & is_listed[None, :]
        scores = tl.load(scores_ptr + number[None, :], mask=is_score, other=0.0)
        is_needed = is_score & through(ordered(scores), number[None, :], cut_key[:, None], cut_last[:, None])
        steps = _place_steps(scores, score_of(cut_key)[:, None], cut_tokens[:, None], scale_log2)
        step = tl.min(tl.where(is_needed, steps, _STEPS - 1), axis=0)
        # They are listed by number. What pads them brings no tokens.
        key = step * _RUN + here
        before = tl.sum(tl.where(key[:, None] < key[None, :], needed[:, None], 0), axis=0)
        tl.store(steps_ptr + lists + begin + here, at * _STEPS + step, mask=is_listed)
        tl.store(places_ptr + lists + at, before, mask=is_listed)
        for first in tl.static_range(0, _STEPS, _SUMMED):
            each = first + tl.arange(0, _SUMMED)
            sums = tl.sum(tl.where(step[:, None] <= each[None, :], needed[:, None], 0), axis=0)
            tl.store(step_sums_ptr + (lists + begin) // _RUN * _STEPS + each, sums)


@triton.jit  # type: ignore[untyped-decorator]
def _place_steps(scores: tl.tensor, cut_score: tl.tensor, cut_tokens: tl.tensor, scale_log2: tl.tensor) -> tl.tensor:
    """Return the steps of places, int32, of clusters with ``scores`` in lists cut at ``cut_score``.

    The same in float32 as in the reference: no product is added to anything, which a compiler might round otherwise.
    """
    higher = tl.maximum((scores - cut_score) * (scale_log2 * _STEPS_OF_OCTAVE), 0.0)
    # A float's leading bits are its logarithm.
    of_cut = (cut_tokens.to(tl.float32).to(tl.int32, bitcast=True) >> _FRACTION_BITS) - _FIRST_STEP
    return tl.minimum(tl.maximum(of_cut - tl.minimum(higher, 2 * _STEPS).to(tl.int32), 0), _STEPS - 1)


@triton.jit  # type: ignore[untyped-decorator]
def place_kernel(
    placed_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    step_sums_ptr: tl.tensor,
    places_ptr: tl.tensor,
    clusters: tl.constexpr,
) -> None:
    """Add to the clusters' places in their runs what comes before them of the other runs."""
    part = tl.program_id(0)
    of_kv_head = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    listed = tl.load(placed_ptr + of_kv_head)
    steps_ptr += of_kv_head * clusters
    places_ptr += of_kv_head * clusters
    step_sums_ptr += of_kv_head * (clusters // _RUN * _STEPS)
    for begin in range(part * _PLACED, listed, tl.num_programs(0) * _PLACED):
        placed = begin + tl.arange(0, _PLACED)
        packed = tl.load(steps_ptr + placed, mask=placed < listed, other=0)
        at, step = packed // _STEPS, packed % _STEPS
        place = tl.load(places_ptr + at, mask=placed < listed, other=0)
        run = placed // _RUN
        in_front = tl.zeros((_OTHERS, _PLACED), tl.int32)
        for others in range(0, tl.cdiv(listed, _RUN), _OTHERS):
            other = others + tl.arange(0, _OTHERS)
            # Of smaller numbers, those in the same step come first too.
            through_step = step[None, :] - (other[:, None] > run[None, :]).to(tl.int32)
            is_other = (other * _RUN < listed)[:, None] & (other[:, None] != run[None, :])
            in_front += tl.load(
                step_sums_ptr + other[:, None] * _STEPS + through_step, mask=is_other & (through_step >= 0), other=0
            )
        tl.store(places_ptr + at, place + tl.sum(in_front, axis=0), mask=placed < listed)
