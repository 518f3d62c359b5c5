"""Scoring all keys before each block: the highest product with one of its representatives, over the key's norm.

Tokens that are always selected score infinity, so that nothing else has to know of them.

A program keeps the representatives of several blocks of one request, 128 vectors in all, in shared memory, and
multiplies a run of keys with them on tensor cores: 2 × representatives × keys × head dim operations for each KV head.
Keys are read once for each such group of blocks, mostly from the L2 cache, since groups that score the same keys run
next to each other; 4 bytes are written for each block and key. What is done with the products, one for each
representative to a score, takes as long as making them: three programs on a multiprocessor take turns.

Norms are computed by a launch before: it reads all keys once, where an index would save most of that, but would have to
be complete for every prefix that is hit; and so what a key scores never depends on where chunks end.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from winnow_kernels.attend.gpu_widening import computable
from winnow_kernels.kernel_arguments import Pointer, Vectors
from winnow_kernels.policies.quoka.prefill.rows import ALIGNMENT, MIN_SCORE
from winnow_kernels.policies.quoka.prefill.tables import (
    BLOCK_COLUMNS,
    COUNT,
    FIRST,
    GROUP_COLUMNS,
    NORMS,
    NORMS_STRIDE,
    NUMBER,
    RECENT,
    REQUEST,
    REQUEST_COLUMNS,
    ROW,
    SCORES,
    SCORES_STRIDE,
    SINKS,
    SPARSE_COLUMNS,
    START,
    TOKENS,
    Blocks,
)

KEYS_AT_ONCE: Final = 64
RUN: Final = 1024
"""Keys that one program scores: enough to pay for loading representatives, few enough to fill the GPU evenly."""
WARPS: Final = 4
_MAX_COLUMNS: Final = 128
_MAX_NUMBERS: Final = 128 * 128

_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)


def columns_of(head_dim: int) -> int:
    """Return how many representatives a program holds: as many as leave room for more programs."""
    return min(_MAX_COLUMNS, _MAX_NUMBERS // triton.next_power_of_2(head_dim))


class Scoring(NamedTuple):
    """What keys are multiplied with for a run's blocks, what scores are divided by, and where those of a batch go."""

    representatives: Pointer
    reciprocals: Pointer
    sparse: Pointer
    groups: Pointer
    scores: Pointer


@triton.jit  # type: ignore[untyped-decorator]
def norms_kernel(
    keys: Vectors,
    blocks: Blocks,
    requests_ptr: tl.tensor,
    reciprocals_ptr: tl.tensor,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    at_once: tl.constexpr,
) -> None:
    """Write the reciprocal norms of a tile of a request's keys of one KV head."""
    own_request_ptr = requests_ptr + tl.program_id(2) * REQUEST_COLUMNS
    tokens = tl.load(own_request_ptr + TOKENS)
    if tl.program_id(1) * at_once >= tokens:
        return
    head = tl.program_id(0)
    place = tl.program_id(1) * at_once + tl.arange(0, at_once)
    is_token = place < tokens
    own_table_ptr = blocks.page_table + tl.load(own_request_ptr + ROW).to(tl.int64) * blocks.table_stride
    page = tl.load(own_table_ptr + (place >> blocks.page_bits), mask=is_token, other=0)
    slot = ((page << blocks.page_bits) + (place & (blocks.page_size - 1))).to(tl.int64)
    channel = tl.arange(0, dim_block)
    vectors = tl.load(
        keys.pointer + (slot * keys.row_stride + head * keys.head_stride)[:, None] + channel[None, :],
        mask=is_token[:, None] & (channel < head_dim)[None, :],
        other=0.0,
    ).to(tl.float32)
    norms = tl.maximum(tl.sqrt_rn(tl.sum(vectors * vectors, axis=1)), _SMALLEST)
    own_reciprocals_ptr = (
        reciprocals_ptr + tl.load(own_request_ptr + NORMS) + head * tl.load(own_request_ptr + NORMS_STRIDE)
    )
    tl.store(own_reciprocals_ptr + place, tl.div_rn(1.0, norms), mask=is_token)


@triton.jit  # type: ignore[untyped-decorator]
def score_kernel(  # noqa: PLR0915  # A kernel's state cannot be handed around in parts.
    keys: Vectors,
    blocks: Blocks,
    scoring: Scoring,
    kv_heads: tl.tensor,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    at_once: tl.constexpr,
    representatives: tl.constexpr,
    columns: tl.constexpr,
    run: tl.constexpr,
) -> None:
    """Score a run of keys for a group of blocks and a KV head."""
    per_tile: tl.constexpr = min(representatives, columns)
    members: tl.constexpr = columns // per_tile
    own_group_ptr = scoring.groups + tl.program_id(0) * GROUP_COLUMNS
    first = tl.load(own_group_ptr + FIRST)
    count = tl.load(own_group_ptr + COUNT)
    head = tl.program_id(2)
    member = tl.arange(0, members)
    is_member = member < count
    own_sparse_ptr = scoring.sparse + (first + member) * SPARSE_COLUMNS
    block_ptr = blocks.fields + tl.load(own_sparse_ptr + NUMBER, mask=is_member, other=0) * BLOCK_COLUMNS
    start = tl.load(block_ptr + START, mask=is_member, other=0)
    row_end = tl.cdiv(start, ALIGNMENT) * ALIGNMENT
    sinks = tl.load(block_ptr + SINKS, mask=is_member, other=0)
    recent_from = start - tl.load(block_ptr + RECENT, mask=is_member, other=0)
    begin = tl.program_id(1) * run
    end = tl.minimum(tl.max(start, axis=0), begin + run)
    if begin >= end:
        return

    offset = tl.load(own_sparse_ptr + SCORES, mask=is_member, other=0)
    own_scores_ptr = scoring.scores + (offset + head * tl.load(own_sparse_ptr + SCORES_STRIDE, mask=is_member, other=0))
    own_reciprocals_ptr = (
        scoring.reciprocals + tl.load(own_group_ptr + NORMS) + head * tl.load(own_group_ptr + NORMS_STRIDE)
    )
    # The blocks of a group are one request's.
    row = tl.max(tl.load(block_ptr + REQUEST, mask=is_member, other=0), axis=0)
    own_table_ptr = blocks.page_table + row.to(tl.int64) * blocks.table_stride
    own_keys_ptr = keys.pointer + head.to(tl.int64) * keys.head_stride
    channel = tl.arange(0, dim_block)
    is_channel = (channel < head_dim)[None, :]
    in_tile = tl.arange(0, at_once)
    lanes: tl.constexpr = min(members, 4)
    of_member, of_representative = _order(columns, per_tile, lanes)
    # In place of blocks that are not there, it is the group's first that is loaded.
    of_block = first + tl.where(of_member < count, of_member, 0)
    own_representatives_ptr = (
        scoring.representatives
        + ((of_block.to(tl.int64) * kv_heads + head) * representatives + of_representative) * head_dim
    )
    for first_representative in tl.static_range(0, representatives, per_tile):
        of_representatives = own_representatives_ptr[:, None] + first_representative * head_dim + channel[None, :]
        vectors = computable(tl.load(of_representatives, mask=is_channel, other=0.0), keys.pointer.dtype.element_ty)
        for tile in tl.range(begin, end, at_once, num_stages=4):
            place = tile + in_tile
            # Behind the last key it is the last that is loaded, so that loads need no masks.
            loaded = tl.minimum(place, end - 1)
            page = tl.load(own_table_ptr + (loaded >> blocks.page_bits))
            slot = (page << blocks.page_bits) + (loaded & (blocks.page_size - 1))
            key_ptrs = own_keys_ptr + (slot.to(tl.int64) * keys.row_stride)[:, None] + channel[None, :]
            key = tl.load(key_ptrs) if head_dim == dim_block else tl.load(key_ptrs, mask=is_channel, other=0.0)
            reciprocal = tl.load(own_reciprocals_ptr + loaded)
            products = tl.dot(key.to(vectors.dtype), tl.trans(vectors), input_precision="ieee")
            products = tl.reshape(products, [at_once, members // lanes, per_tile // 2, lanes, 2])
            highest = tl.reshape(tl.max(tl.max(products, axis=4), axis=2), [at_once, members])
            # Norms are positive: dividing the maximum is dividing the products.
            scores = highest * reciprocal[:, None]
            scores_ptrs = own_scores_ptr[None, :] + place[:, None]
            # Of a number and nan it is the number.
            scores = tl.maximum(scores, MIN_SCORE)
            is_kept = (place[:, None] < sinks[None, :]) | (place[:, None] >= recent_from[None, :])
            scores = tl.where(is_kept, float("inf"), scores)
            scores = tl.where(place[:, None] < start[None, :], scores, -float("inf"))
            is_in_row = place[:, None] < row_end[None, :]
            if first_representative > 0:
                scores = tl.maximum(scores, tl.load(scores_ptrs, mask=is_in_row, other=0.0))
            tl.store(scores_ptrs, scores, mask=is_in_row)
        if first_representative + per_tile < representatives:
            # Other threads may read again what this one stored.
            tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def _order(columns: tl.constexpr, representatives: tl.constexpr, lanes: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return of which block and which of its representatives the columns are.

    A row of products is dealt out to four threads, two neighbours to each in turn. In this order a thread gets all
    representatives of a block, and need not ask others for the highest product.
    """
    column = tl.arange(0, columns)
    member = column // (lanes * representatives) * lanes + column // 2 % lanes
    return member, column // (lanes * 2) % (representatives // 2) * 2 + column % 2
