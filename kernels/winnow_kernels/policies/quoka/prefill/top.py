"""The best-scored tokens before each block, without a sort: six launches for all blocks and KV heads of a batch.

A row is a block's scores for one KV head. Its threshold, the least score that is selected, is searched first:

1. A sample of 2,048 scores, or 8,192 of more than 32,768, brackets it (``quoka_prefill_bracket``): a program for each
   row.
2. One pass counts the scores above the bracket and lists those in it: a program for each piece of a row.
3. Where the sample misled, or too many scores are all but equal, the bracket is moved or narrowed by more passes, so
   that the result is exact whatever the scores are (``quoka_prefill_threshold``): a program for each row.
4. The list is searched in registers: a program for each row.

Then it is known what is selected, and is written in order of position, both with a program for each piece:

5. One pass counts what each piece selects.
6. One pass writes the slots, behind those of the pieces before.

So scores are read three times, 4 bytes each; in the pieces, which are thousands, nothing waits for anything but them.
Up to 8,192 scores need no sample: they are their own list.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.policies.quoka.prefill.bracket import bracket_kernel, list_kernel
from winnow_kernels.policies.quoka.prefill.rows import (
    GREATER,
    LEAST,
    MARKS,
    SEGMENT,
    Scored,
    counted_up_to,
    load_scores,
    places_of,
    row_of,
    score_of,
)
from winnow_kernels.policies.quoka.prefill.tables import BUDGET, NUMBER, REQUEST, SPARSE_COLUMNS, START, Blocks
from winnow_kernels.policies.quoka.prefill.threshold import narrow_kernel, threshold_kernel
from winnow_kernels.prefill.blocks import PrefillBlocks

LISTED: Final = 8192
"""Scores that are sampled at most, and that are searched in registers; behind a longer row there must be room for so
many."""
SCORES_AT_ONCE: Final = 2048
"""Scores in a piece."""
ROW_WARPS: Final = 4
NARROW_WARPS: Final = 8
PIECE_WARPS: Final = 4
COUNTS_AT_ONCE: Final = 128
"""Pieces whose counts are read at a time."""


def marks_of(rows: int, longest: int) -> int:
    """Return how many numbers ``write_top`` needs as ``marks`` for some rows of at most ``longest`` scores."""
    return rows * (MARKS.value + triton.cdiv(longest, SCORES_AT_ONCE))


def write_top(
    scores: Tensor, sparse: Tensor, blocks: PrefillBlocks, longest: int, marks: Tensor, selected: Tensor
) -> None:
    """Write the slots of the tokens that score most for each block and KV head; of equal scores the first come first.

    Args:
        scores: float32 [numbers].
        sparse: int32 [sparse blocks, 3]; columns as in ``quoka_prefill_tables``.
        blocks: of the pass.
        longest: the most tokens before one of the sparse blocks.
        marks: int32 [at least ``marks_of``]; scratch.
        selected: int32 [blocks, KV heads, width].
    """
    kv_heads = selected.shape[1]
    rows = (len(sparse), kv_heads)
    pieces = (triton.cdiv(longest, SCORES_AT_ONCE), *rows)
    of_rows = (Scored(scores, sparse, blocks.fields, marks), MARKS.value + pieces[0])
    bracket_kernel[rows](*of_rows, listed=LISTED, num_warps=ROW_WARPS)
    list_kernel[pieces](*of_rows, listed=LISTED, block=SCORES_AT_ONCE, num_warps=PIECE_WARPS)
    narrow_kernel[rows](*of_rows, listed=LISTED, block=SCORES_AT_ONCE, num_warps=NARROW_WARPS)
    threshold_kernel[rows](*of_rows, listed=LISTED, num_warps=ROW_WARPS)
    count_kernel[pieces](*of_rows, block=SCORES_AT_ONCE, num_warps=PIECE_WARPS)
    write_kernel[pieces](
        *of_rows,
        Blocks.of(blocks),
        selected,
        selected.shape[2],
        block=SCORES_AT_ONCE,
        counts=COUNTS_AT_ONCE,
        num_warps=PIECE_WARPS,
    )


@triton.jit(do_not_specialize=["marks_stride"])  # type: ignore[untyped-decorator]
def count_kernel(
    scored: Scored,
    marks_stride: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Write how many scores of a piece are greater than the threshold, and in the upper half how many equal it."""
    piece = tl.program_id(0)
    own_scores_ptr, own_marks_ptr, block_ptr, _ = row_of(scored, marks_stride, axis=1)
    tokens = tl.load(block_ptr + START)
    if piece * block >= tokens:
        return
    scores = load_scores(own_scores_ptr, piece * block + tl.arange(0, block), tokens)
    least = score_of(tl.load(own_marks_ptr + LEAST))
    counts = tl.where(scores > least, 1, tl.where(scores == least, 1 << 16, 0))
    tl.store(own_marks_ptr + MARKS + piece, tl.sum(counts, axis=0))


@triton.jit(do_not_specialize=["marks_stride"])  # type: ignore[untyped-decorator]
def write_kernel(
    scored: Scored,
    marks_stride: tl.tensor,
    blocks: Blocks,
    slots_ptr: tl.tensor,
    width: tl.tensor,
    block: tl.constexpr,
    counts: tl.constexpr,
) -> None:
    """Write the slots of a piece's tokens that are selected."""
    piece = tl.program_id(0)
    own_scores_ptr, own_marks_ptr, block_ptr, _ = row_of(scored, marks_stride, axis=1)
    tokens = tl.load(block_ptr + START)
    if piece * block >= tokens:
        return
    greater_before = 0
    equal_before = 0
    for start in range(0, piece, counts):
        other = start + tl.arange(0, counts)
        counted = tl.load(own_marks_ptr + MARKS + other, mask=other < piece, other=0)
        greater_before += tl.sum(counted & 0xFFFF, axis=0)
        equal_before += tl.sum(counted >> 16, axis=0)
    # Of the equal ones the first are selected, as many as there is room for.
    room = tl.load(block_ptr + BUDGET) - tl.load(own_marks_ptr + GREATER)
    first = greater_before + tl.minimum(equal_before, room)
    room = tl.maximum(room - equal_before, 0)
    equal = tl.load(own_marks_ptr + MARKS + piece) >> 16

    place = places_of(piece, block)
    scores = load_scores(own_scores_ptr, place, tokens)
    least = tl.load(own_marks_ptr + LEAST)
    if (room > 0) & (room < equal):
        is_equal = scores == score_of(least)
        is_first = counted_up_to(is_equal.to(tl.int32)) <= room
        selected = ((scores > score_of(least)) | (is_equal & is_first)).to(tl.int32)
    else:
        selected = (scores >= score_of(tl.where(room > 0, least, least + 1))).to(tl.int32)
    own_table_ptr = blocks.page_table + tl.load(block_ptr + REQUEST).to(tl.int64) * blocks.table_stride
    if blocks.page_size >= SEGMENT:
        first_place = piece * block + tl.arange(0, block // SEGMENT) * SEGMENT
        page = tl.load(own_table_ptr + (first_place >> blocks.page_bits), mask=first_place < tokens, other=0)[None, :]
    else:
        page = tl.load(own_table_ptr + (place >> blocks.page_bits), mask=selected > 0, other=0)
    slot = (page << blocks.page_bits) + (place & (blocks.page_size - 1))
    number = tl.load(scored.sparse + tl.program_id(1) * SPARSE_COLUMNS + NUMBER)
    own_slots_ptr = slots_ptr + (number * tl.num_programs(2) + tl.program_id(2)).to(tl.int64) * width + first - 1
    tl.store(own_slots_ptr + counted_up_to(selected), slot, mask=selected > 0)
