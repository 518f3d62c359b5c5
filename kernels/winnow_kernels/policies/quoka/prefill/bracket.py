"""Bracketing a row's threshold by a sample of its scores, and listing what lies in the bracket."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.policies.quoka.prefill.rows import (
    ABOVE,
    BETWEEN,
    LOWER,
    UPPER,
    Scored,
    counted_up_to,
    load_scores,
    places_of,
    row_of,
    score_of,
)
from winnow_kernels.policies.quoka.prefill.tables import BUDGET, START
from winnow_kernels.selection.gpu_threshold import HIGHEST, LOWEST, ordered, threshold

# Neighbours in the sample: a sector of memory.
_RUN: Final = tl.constexpr(8)


@triton.jit(do_not_specialize=["marks_stride"])  # type: ignore[untyped-decorator]
def bracket_kernel(
    scored: Scored,
    marks_stride: tl.tensor,
    listed: tl.constexpr,
) -> None:
    """Write two keys that a row's threshold probably lies between, the lower one included.

    Nothing is counted yet, except in a short row: it is its own list.
    """
    own_scores_ptr, own_marks_ptr, block_ptr, _ = row_of(scored, marks_stride, axis=0)
    tokens = tl.load(block_ptr + START)
    lower = tokens * 0 + LOWEST
    upper = tokens * 0 + HIGHEST
    if tokens > 4 * listed:
        lower, upper = _sampled_bracket(own_scores_ptr, tokens, tl.load(block_ptr + BUDGET), listed, listed)
    elif tokens > listed:
        # Of a row that is not as long the list has room for what a quarter of the sample leaves open.
        lower, upper = _sampled_bracket(own_scores_ptr, tokens, tl.load(block_ptr + BUDGET), listed // 4, listed)
    tl.store(own_marks_ptr + LOWER, lower)
    tl.store(own_marks_ptr + UPPER, upper)
    tl.store(own_marks_ptr + ABOVE, 0)
    tl.store(own_marks_ptr + BETWEEN, tl.where(tokens > listed, 0, tokens))


@triton.jit  # type: ignore[untyped-decorator]
def _sampled_bracket(
    scores_ptr: tl.tensor, count: tl.tensor, wanted: tl.tensor, sampled: tl.constexpr, listed: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    number = tl.arange(0, sampled)
    keys = ordered(tl.load(scores_ptr + number // _RUN * (count // (sampled // _RUN)) + number % _RUN))
    share = wanted.to(tl.float32) / count
    expected = share * sampled
    # Six standard deviations, for scores near each other are alike; but not more than the list has room for.
    margin = tl.minimum(6 * tl.sqrt(expected * (1 - share)) + 8, 0.35 * listed / count * sampled)
    fewer = tl.floor(expected - margin).to(tl.int32)
    more = tl.minimum(tl.ceil(expected + margin).to(tl.int32), sampled)
    ones = tl.full([sampled], 1, tl.int32)
    lower = threshold(keys, ones, more)
    upper = threshold(keys, ones, tl.maximum(fewer, 1))
    return lower, tl.maximum(tl.where(fewer > 0, upper, HIGHEST), lower + 1)


@triton.jit(do_not_specialize=["marks_stride"])  # type: ignore[untyped-decorator]
def list_kernel(
    scored: Scored,
    marks_stride: tl.tensor,
    listed: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Count a piece's scores above and in its row's bracket, and list the latter, in any order, if there is room."""
    piece = tl.program_id(0)
    own_scores_ptr, own_marks_ptr, block_ptr, stride = row_of(scored, marks_stride, axis=1)
    tokens = tl.load(block_ptr + START)
    if (piece * block >= tokens) | (tokens <= listed):
        return
    lower = score_of(tl.load(own_marks_ptr + LOWER))
    upper = score_of(tl.load(own_marks_ptr + UPPER))
    scores = load_scores(own_scores_ptr, places_of(piece, block), tokens)
    # Both are counted at once: those between in the upper bits.
    counts = tl.where(scores >= upper, 1, tl.where(scores >= lower, 1 << 16, 0))
    up_to = counted_up_to(counts)
    all_counts = tl.sum(tl.sum(counts, axis=0), axis=0)
    between = all_counts >> 16
    tl.atomic_add(own_marks_ptr + ABOVE, all_counts & 0xFFFF, sem="relaxed")
    before = tl.atomic_add(own_marks_ptr + BETWEEN, between, sem="relaxed")
    if before + between <= listed:
        tl.store(own_scores_ptr + (stride - listed) + before + (up_to >> 16) - 1, scores, mask=counts > 1)
