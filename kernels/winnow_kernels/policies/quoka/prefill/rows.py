"""Rows of scores, each a block's for one KV head, and what is known of them while their best are searched."""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl

from winnow_kernels.kernel_arguments import Pointer
from winnow_kernels.policies.quoka.prefill.tables import (
    BLOCK_COLUMNS,
    NUMBER,
    SCORES,
    SCORES_STRIDE,
    SPARSE_COLUMNS,
)
from winnow_kernels.prefill import blocks as prefill_blocks
from winnow_kernels.selection.gpu_threshold import HIGHEST

ALIGNMENT: Final = tl.constexpr(prefill_blocks.ALIGNMENT)
"""Rows begin at multiples of so many numbers, and are filled up to there with -inf: so they are read four at a time."""
MIN_SCORE: Final = tl.constexpr(-3e38)
"""No score is less, and none is nan: whatever queries and keys are, numbers can be compared and as many selected."""

SEGMENT: Final = tl.constexpr(16)
"""Neighbours that one thread ranks, so that threads exchange one number each."""

# The columns of what is known. Keys are those of ``threshold.ordered``.
MARKS: Final = tl.constexpr(8)
LOWER: Final = tl.constexpr(0)  # The threshold's key is at least this,
UPPER: Final = tl.constexpr(1)  # and less than this.
ABOVE: Final = tl.constexpr(2)  # Scores that reach the upper bound,
BETWEEN: Final = tl.constexpr(3)  # and those that reach the lower one only.
LEAST: Final = tl.constexpr(4)  # The threshold's key,
GREATER: Final = tl.constexpr(5)  # and how many scores are greater.


class Scored(NamedTuple):
    """Rows of scores, the table of their sparse blocks, ``Blocks.fields``, and the rows' ``MARKS``."""

    scores: Pointer
    sparse: Pointer
    fields: Pointer
    marks: Pointer


@triton.jit  # type: ignore[untyped-decorator]
def row_of(
    scored: Scored, marks_stride: tl.tensor, axis: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return where the scores, the marks and the block of a program's row are, and how many numbers the row takes.

    ``axis`` of the grid has the sparse blocks, the next one the KV heads.
    """
    sparse, head, kv_heads = tl.program_id(axis), tl.program_id(axis + 1), tl.num_programs(axis + 1)
    own_sparse_ptr = scored.sparse + sparse * SPARSE_COLUMNS
    stride = tl.load(own_sparse_ptr + SCORES_STRIDE)
    offset = tl.multiple_of(tl.load(own_sparse_ptr + SCORES) + head * stride, ALIGNMENT)
    block_ptr = scored.fields + tl.load(own_sparse_ptr + NUMBER) * BLOCK_COLUMNS
    return scored.scores + offset, scored.marks + (sparse * kv_heads + head) * marks_stride, block_ptr, stride


@triton.jit  # type: ignore[untyped-decorator]
def load_scores(scores_ptr: tl.tensor, place: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Return scores of a row of ``count``; behind them -inf, which no score is."""
    # A mask that is the same for a whole run of places leaves loads wide: up to the run's end -inf is stored.
    return tl.load(scores_ptr + place, mask=place // ALIGNMENT < tl.cdiv(count, ALIGNMENT), other=-float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def score_of(key: tl.tensor) -> tl.tensor:
    """Return the score that has a key; nan, which nothing reaches, if it is above all keys of numbers."""
    return tl.where(key < 0, key ^ HIGHEST, key).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def places_of(piece: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """Return the places of a piece's scores, [neighbours, segments]."""
    segment = tl.arange(0, block // SEGMENT)
    return piece * block + segment[None, :] * SEGMENT + tl.arange(0, SEGMENT)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def counted_up_to(counts: tl.tensor) -> tl.tensor:
    """Return for each place of ``places_of`` the sum of the ``counts`` up to it, itself included."""
    of_segment = tl.sum(counts, axis=0)
    before = tl.cumsum(of_segment, axis=0) - of_segment
    return tl.cumsum(counts, axis=0) + before[None, :]
