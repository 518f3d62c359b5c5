"""The exact threshold of a row of scores, from what is listed of them."""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.policies.quoka.prefill.rows import (
    ABOVE,
    ALIGNMENT,
    BETWEEN,
    GREATER,
    LEAST,
    LOWER,
    UPPER,
    Scored,
    load_scores,
    row_of,
)
from winnow_kernels.policies.quoka.prefill.tables import BUDGET, START
from winnow_kernels.selection.gpu_threshold import HIGHEST, LOWEST, ordered, threshold


@triton.jit(do_not_specialize=["marks_stride"])  # type: ignore[untyped-decorator]
def narrow_kernel(
    scored: Scored,
    marks_stride: tl.tensor,
    listed: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Move or narrow a bracket that misses the threshold or holds more scores than fit, and list anew what lies in it.

    Afterwards the threshold lies in it, and what lies in it is listed, or has the same key: the lower bound.
    """
    own_scores_ptr, own_marks_ptr, block_ptr, stride = row_of(scored, marks_stride, axis=0)
    count = tl.load(block_ptr + START)
    wanted = tl.load(block_ptr + BUDGET)
    first = tl.load(own_marks_ptr + LOWER).to(tl.int64)
    second = tl.load(own_marks_ptr + UPPER).to(tl.int64)
    at_second = tl.load(own_marks_ptr + ABOVE)
    between = tl.load(own_marks_ptr + BETWEEN)
    at_first = at_second + between
    if (at_second < wanted) & (at_first >= wanted) & (between <= listed):
        return
    # Throughout: at least ``wanted`` keys reach ``low``, fewer than that reach ``high``.
    low = tl.full((), LOWEST, tl.int64)
    high = tl.full((), HIGHEST, tl.int64)
    at_low = count
    at_high = wanted * 0
    searching = wanted > 0
    while searching:
        is_above = at_second >= wanted
        is_below = at_first < wanted
        low = tl.where(is_above, second, tl.where(is_below, low, first))
        at_low = tl.where(is_above, at_second, tl.where(is_below, at_low, at_first))
        high = tl.where(is_above, high, tl.where(is_below, first, second))
        at_high = tl.where(is_above, at_high, tl.where(is_below, at_first, at_second))
        fits = at_low - at_high <= listed
        is_listed = fits & (low == first) & (high == second)
        searching = (is_listed == 0) & (high - low > 1)
        if searching:
            third = tl.maximum((high - low) // 3, 1)
            first = tl.where(fits, low, low + third)
            second = tl.where(fits, high, low + 2 * third)
            at_first, at_second = _count(
                own_scores_ptr, own_scores_ptr + (stride - listed), count, first, second, listed, block
            )
    tl.store(own_marks_ptr + LOWER, low.to(tl.int32))
    tl.store(own_marks_ptr + UPPER, high.to(tl.int32))
    tl.store(own_marks_ptr + ABOVE, at_high)
    tl.store(own_marks_ptr + BETWEEN, at_low - at_high)


@triton.jit(do_not_specialize=["marks_stride"])  # type: ignore[untyped-decorator]
def threshold_kernel(
    scored: Scored,
    marks_stride: tl.tensor,
    listed: tl.constexpr,
) -> None:
    """Write the key of the least score that is selected of a row, and how many scores are greater."""
    own_scores_ptr, own_marks_ptr, block_ptr, stride = row_of(scored, marks_stride, axis=0)
    tokens = tl.load(block_ptr + START)
    wanted = tl.load(block_ptr + BUDGET)
    least = tl.load(own_marks_ptr + LOWER)
    upper = tl.load(own_marks_ptr + UPPER)
    greater = tl.load(own_marks_ptr + ABOVE)
    between = tl.load(own_marks_ptr + BETWEEN)
    if (upper != least) & (upper != least + 1):
        # A short row is its own list.
        list_ptr = own_scores_ptr + tl.multiple_of(tl.where(tokens > listed, stride - listed, 0), ALIGNMENT)
        if between <= listed // 4:
            least, greater_of_list = _listed_threshold(list_ptr, between, wanted - greater, listed // 4)
        else:
            least, greater_of_list = _listed_threshold(list_ptr, between, wanted - greater, listed)
        greater += greater_of_list
    tl.store(own_marks_ptr + LEAST, least)
    tl.store(own_marks_ptr + GREATER, greater)


@triton.jit  # type: ignore[untyped-decorator]
def _listed_threshold(
    list_ptr: tl.tensor, count: tl.tensor, wanted: tl.tensor, listed: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the key of the ``wanted``-th largest of a list, and how many are greater."""
    number = tl.arange(0, listed)
    keys = ordered(load_scores(list_ptr, number, count))
    # In place of what is not there the smallest, which changes nothing: registers need not tell them apart.
    keys = tl.where(number < count, keys, tl.min(tl.where(number < count, keys, HIGHEST), axis=0))
    least = threshold(keys, tl.full([listed], 1, tl.int32), wanted)
    return least, tl.sum((keys > least).to(tl.int32), axis=0)


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
    # The next pass may list anew, by other threads.
    tl.debug_barrier()
    above_all = tl.sum(above, axis=0)
    return above_all + between, above_all
