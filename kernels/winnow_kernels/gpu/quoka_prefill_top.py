"""The best-scored tokens before each block, without a sort, in one launch: a program for each block and KV head.

A sample of 8,192 scores brackets the threshold. One pass over the scores counts what lies above the bracket and lists
what lies in it; the threshold is found in the list, in registers. A second pass writes the slots of what reaches the
threshold, in order of position. So scores are read a little more than twice, 4 bytes each, from the L2 cache as far as
they fit. Where the sample misled, or too many scores are all but equal, the bracket is moved or narrowed by one more
pass each, so that the result is exact whatever the scores are. Up to 8,192 scores need no sample.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.gpu.quoka_prefill_tables import (
    BLOCK_COLUMNS,
    BUDGET,
    NUMBER,
    REQUEST,
    SCORES,
    SCORES_STRIDE,
    SPARSE_COLUMNS,
    START,
)
from winnow_kernels.gpu.threshold import HIGHEST, LOWEST, ordered, threshold

LISTED: Final = 8192
"""Scores that are searched in registers; behind a row of more scores there must be room for as many."""
SCORES_AT_ONCE: Final = 4096
WARPS: Final = 16
# Neighbours in the sample: a sector of memory.
_RUN: Final = tl.constexpr(8)


@triton.jit  # type: ignore[untyped-decorator]
def top_kernel(
    scores_ptr: tl.tensor,
    sparse_ptr: tl.tensor,
    fields_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    table_stride: tl.tensor,
    width: tl.tensor,
    page_bits: tl.constexpr,
    listed: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write the slots of the tokens that score most for a block and KV head; of equal scores the first come first."""
    own_sparse_ptr = sparse_ptr + tl.program_id(0) * SPARSE_COLUMNS
    head = tl.program_id(1)
    number = tl.load(own_sparse_ptr + NUMBER)
    stride = tl.load(own_sparse_ptr + SCORES_STRIDE)
    # Whole 64 bytes: so scores can be read four at a time.
    offset = tl.multiple_of(tl.load(own_sparse_ptr + SCORES) + head * stride, 16)
    own_scores_ptr = scores_ptr + offset
    block_ptr = fields_ptr + number * BLOCK_COLUMNS
    tokens = tl.load(block_ptr + START)
    wanted = tl.load(block_ptr + BUDGET)
    if tokens <= listed:
        keys, is_key = _keys(own_scores_ptr, tl.arange(0, listed), tokens)
        least = threshold(keys, is_key.to(tl.int32), wanted)
        greater = tl.sum((is_key & (keys > least)).to(tl.int32), axis=0)
    else:
        least, greater = _stored_threshold(own_scores_ptr, tokens, wanted, stride, listed, block)

    own_table_ptr = page_table_ptr + tl.load(block_ptr + REQUEST).to(tl.int64) * table_stride
    own_slots_ptr = slots_ptr + (number * tl.num_programs(1) + head).to(tl.int64) * width
    room_for_equal = wanted - greater
    for start in tl.range(0, tokens, block, num_stages=3):
        place = start + tl.arange(0, block)
        keys, is_key = _keys(own_scores_ptr, place, tokens)
        is_greater = is_key & (keys > least)
        is_equal = is_key & (keys == least)
        # Both are counted at once: the equal ones in the upper bits.
        packed = is_greater.to(tl.int32) + (is_equal.to(tl.int32) << 16)
        up_to = tl.cumsum(packed, axis=0)
        equal_up_to = up_to >> 16
        is_selected = is_greater | (is_equal & (equal_up_to <= room_for_equal))
        rank = (up_to & 0xFFFF) + tl.minimum(equal_up_to, room_for_equal)
        page = tl.load(own_table_ptr + (place >> page_bits), mask=is_selected, other=0)
        slot = (page << page_bits) + (place & ((1 << page_bits) - 1))
        tl.store(own_slots_ptr + rank - 1, slot, mask=is_selected)
        in_block = tl.sum(packed, axis=0)
        equal = tl.minimum(in_block >> 16, room_for_equal)
        own_slots_ptr += (in_block & 0xFFFF) + equal
        room_for_equal -= equal


@triton.jit  # type: ignore[untyped-decorator]
def _keys(scores_ptr: tl.tensor, place: tl.tensor, count: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return integers that compare as the scores do, and whether there is a score."""
    is_key = place < count
    return ordered(tl.load(scores_ptr + place, mask=is_key, other=0.0)), is_key


@triton.jit  # type: ignore[untyped-decorator]
def _stored_threshold(
    scores_ptr: tl.tensor,
    count: tl.tensor,
    wanted: tl.tensor,
    stride: tl.tensor,
    listed: tl.constexpr,
    block: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the key of the ``wanted``-th largest of more than ``listed`` scores, and how many are greater."""
    list_ptr = scores_ptr + (stride - listed)
    first, second = _sampled_bracket(scores_ptr, count, wanted, listed)
    # Throughout: at least ``wanted`` keys reach ``low``, fewer than that reach ``high``.
    low = tl.full((), LOWEST, tl.int64)
    high = tl.full((), HIGHEST, tl.int64)
    at_low = count
    at_high = wanted * 0
    is_listed = wanted < 0
    while (is_listed == 0) & (high - low > 1):
        at_first, at_second = _count(scores_ptr, list_ptr, count, first, second, listed, block)
        is_above = at_second >= wanted
        is_below = at_first < wanted
        low = tl.where(is_above, second, tl.where(is_below, low, first))
        at_low = tl.where(is_above, at_second, tl.where(is_below, at_low, at_first))
        high = tl.where(is_above, high, tl.where(is_below, first, second))
        at_high = tl.where(is_above, at_high, tl.where(is_below, at_first, at_second))
        fits = at_low - at_high <= listed
        is_listed = fits & (low == first) & (high == second)
        third = tl.maximum((high - low) // 3, 1)
        first = tl.where(fits, low, low + third)
        second = tl.where(fits, high, low + 2 * third)
    least = low.to(tl.int32)
    greater = at_high
    if is_listed:
        keys, is_key = _keys(list_ptr, tl.arange(0, listed), at_low - at_high)
        least = threshold(keys, is_key.to(tl.int32), wanted - at_high)
        greater = at_high + tl.sum((is_key & (keys > least)).to(tl.int32), axis=0)
    return least, greater


@triton.jit  # type: ignore[untyped-decorator]
def _sampled_bracket(
    scores_ptr: tl.tensor, count: tl.tensor, wanted: tl.tensor, listed: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return two keys, int64, that the threshold probably lies between, the lower one included."""
    number = tl.arange(0, listed)
    keys = ordered(tl.load(scores_ptr + number // _RUN * (count // (listed // _RUN)) + number % _RUN))
    share = wanted.to(tl.float32) / count
    expected = share * listed
    # Six standard deviations, for scores near each other are alike; but not more than the list has room for.
    margin = tl.minimum(6 * tl.sqrt(expected * (1 - share)) + 8, 0.35 * listed / count * listed)
    fewer = tl.floor(expected - margin).to(tl.int32)
    more = tl.minimum(tl.ceil(expected + margin).to(tl.int32), listed)
    ones = tl.full([listed], 1, tl.int32)
    lower = threshold(keys, ones, more).to(tl.int64)
    upper = threshold(keys, ones, tl.maximum(fewer, 1)).to(tl.int64)
    return lower, tl.maximum(tl.where(fewer > 0, upper, HIGHEST), lower + 1)


@triton.jit  # type: ignore[untyped-decorator]
def _count(
    scores_ptr: tl.tensor,
    list_ptr: tl.tensor,
    count: tl.tensor,
    lower: tl.tensor,
    upper: tl.tensor,
    listed: tl.constexpr,
    block: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return how many keys reach ``lower`` and ``upper``, and list the scores between as far as there is room."""
    lower_key = lower.to(tl.int32)
    upper_key = upper.to(tl.int32)
    above = tl.zeros([block], tl.int32)
    between = count * 0
    for start in tl.range(0, count, block, num_stages=3):
        place = start + tl.arange(0, block)
        inside = place < count
        scores = tl.load(scores_ptr + place, mask=inside, other=0.0)
        keys = ordered(scores)
        above += (inside & (keys >= upper_key)).to(tl.int32)
        is_between = inside & (keys >= lower_key) & (keys < upper_key)
        rank = between + tl.cumsum(is_between.to(tl.int32), axis=0)
        tl.store(list_ptr + rank - 1, scores, mask=is_between & (rank <= listed))
        between += tl.sum(is_between.to(tl.int32), axis=0)
    # Other threads read what this one listed.
    tl.debug_barrier()
    above_all = tl.sum(above, axis=0)
    return above_all + between, above_all
