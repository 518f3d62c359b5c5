"""The queries that speak for each block (``reference.speaking_queries``), in two launches.

Ranking reads each query of the sparse blocks twice, the second time mostly from the L1 or L2 cache: for a block's mean,
then for each query's cosine with it. A position's rank is how many positions precede it, by the mean of these cosines
over the group. Averaging reads the chosen queries again.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.kernel_arguments import Vectors
from winnow_kernels.policies.quoka.prefill.tables import (
    BEGIN,
    BLOCK_COLUMNS,
    END,
    FIRST_QUERY,
    NUMBER,
    REPRESENTATIVES,
    SPARSE_COLUMNS,
    Blocks,
)

QUERIES_AT_ONCE: Final = 32
RANK_WARPS: Final = 8
REPRESENTATIVES_AT_ONCE: Final = 16
# Queries that others are compared with at a time.
_COMPARED: Final = tl.constexpr(128)
# As torch.nn.functional.cosine_similarity and normalize.
_MIN_IN_COSINE: Final = tl.constexpr(1e-8)
_MIN_NORM: Final = tl.constexpr(1e-12)


@triton.jit  # type: ignore[untyped-decorator]
def rank_kernel(
    queries: Vectors,
    blocks: Blocks,
    sparse_ptr: tl.tensor,
    ranked_ptr: tl.tensor,
    group: tl.tensor,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    representatives: tl.constexpr,
    rows: tl.constexpr,
    tiles: tl.constexpr,
) -> None:
    """Write which queries of a block speak for a KV head, the least typical first: int32, counted from the block's.

    Of queries that are as typical the first comes first. Beyond the block's number of representatives the first is
    repeated.
    """
    sparse = tl.program_id(0)
    kv_head = tl.program_id(1)
    block_ptr = blocks.fields + tl.load(sparse_ptr + sparse * SPARSE_COLUMNS + NUMBER) * BLOCK_COLUMNS
    count = tl.load(block_ptr + END) - tl.load(block_ptr + BEGIN)
    wanted = tl.load(block_ptr + REPRESENTATIVES)
    own_ranked_ptr = ranked_ptr + (sparse * tl.num_programs(1) + kv_head).to(tl.int64) * representatives
    representative = tl.arange(0, representatives)
    if count <= wanted:
        tl.store(own_ranked_ptr + representative, tl.where(representative < count, representative, 0))
        return

    channel = tl.arange(0, dim_block)
    block_queries_ptr = (
        queries.pointer + tl.load(block_ptr + FIRST_QUERY).to(tl.int64) * queries.row_stride + channel[None, :]
    )
    is_channel = (channel < head_dim)[None, :]
    in_tile = tl.arange(0, rows)
    tile_number = tl.arange(0, tiles)[:, None]
    likenesses = tl.zeros([tiles, rows], tl.float32)
    for member in range(group):
        own_queries_ptr = block_queries_ptr + (kv_head * group + member) * queries.head_stride
        total = tl.zeros([rows, dim_block], tl.float32)
        for start in tl.range(0, count, rows, num_stages=3):
            row = start + in_tile
            mask = (row < count)[:, None] & is_channel
            total += tl.load(own_queries_ptr + (row * queries.row_stride)[:, None], mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(total, axis=0) / count
        mean_norm = tl.maximum(tl.sqrt_rn(tl.sum(mean * mean, axis=0)), _MIN_IN_COSINE)
        for start in tl.range(0, count, rows, num_stages=3):
            row = start + in_tile
            mask = (row < count)[:, None] & is_channel
            query = tl.load(own_queries_ptr + (row * queries.row_stride)[:, None], mask=mask, other=0.0).to(tl.float32)
            norms = tl.maximum(tl.sqrt_rn(tl.sum(query * query, axis=1)), _MIN_IN_COSINE)
            likeness = tl.sum(query * mean[None, :], axis=1) / (norms * mean_norm)
            likenesses += tl.where(tile_number == start // rows, likeness[None, :], 0.0)
    # Ranks must be a permutation even if there are NaNs.
    is_likeness = (tile_number * rows + in_tile[None, :] < count) & (likenesses < float("inf"))
    likenesses = tl.where(is_likeness, likenesses / group, float("inf"))

    # The others lie along the first axis, which threads have to themselves: each counts for queries of its own.
    at_once: tl.constexpr = min(tiles * rows, _COMPARED)
    of_others = tl.reshape(likenesses, [tiles * rows // at_once, at_once])
    others_number = tl.arange(0, tiles * rows // at_once)[:, None]
    least_typical = 0
    for start in range(0, count, rows):
        row = start + in_tile
        own = tl.sum(tl.where(tile_number == start // rows, likenesses, 0.0), axis=0)[None, :]
        rank = tl.zeros([rows], tl.int32)
        for first_other in range(0, count, at_once):
            others = tl.sum(tl.where(others_number == first_other // at_once, of_others, 0.0), axis=0)[:, None]
            other_row = first_other + tl.arange(0, at_once)[:, None]
            precedes = (others < own) | ((others == own) & (other_row < row[None, :]))
            rank += tl.sum(precedes.to(tl.int32), axis=0)
        tl.store(own_ranked_ptr + rank, row, mask=rank < tl.minimum(wanted, count))
        least_typical += tl.sum(tl.where(rank == 0, row, 0), axis=0)
    tl.store(
        own_ranked_ptr + representative,
        tl.full([representatives], 0, tl.int32) + least_typical,
        mask=representative >= wanted,
    )


@triton.jit  # type: ignore[untyped-decorator]
def average_kernel(
    queries: Vectors,
    blocks: Blocks,
    sparse_ptr: tl.tensor,
    ranked_ptr: tl.tensor,
    representatives_ptr: tl.tensor,
    group: tl.tensor,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    representatives: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write a tile of a block's representatives for a KV head: the mean over its query heads of normalised queries."""
    sparse = tl.program_id(0)
    kv_head = tl.program_id(1)
    block_ptr = blocks.fields + tl.load(sparse_ptr + sparse * SPARSE_COLUMNS + NUMBER) * BLOCK_COLUMNS
    channel = tl.arange(0, dim_block)
    is_channel = (channel < head_dim)[None, :]
    representative = tl.program_id(2) * tile + tl.arange(0, tile)
    own_queries_ptr = (
        queries.pointer + tl.load(block_ptr + FIRST_QUERY).to(tl.int64) * queries.row_stride + channel[None, :]
    )
    row = tl.load(ranked_ptr + (sparse * tl.num_programs(1) + kv_head).to(tl.int64) * representatives + representative)
    total = tl.zeros([tile, dim_block], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        query = tl.load(
            own_queries_ptr + (row * queries.row_stride + head * queries.head_stride)[:, None],
            mask=is_channel,
            other=0.0,
        ).to(tl.float32)
        norms = tl.maximum(tl.sqrt_rn(tl.sum(query * query, axis=1)), _MIN_NORM)
        total += query / norms[:, None]
    own_representatives_ptr = representatives_ptr + (sparse * tl.num_programs(1) + kv_head).to(tl.int64) * (
        representatives * head_dim
    )
    mean = (total / group).to(representatives_ptr.dtype.element_ty)
    tl.store(own_representatives_ptr + (representative * head_dim)[:, None] + channel[None, :], mean, mask=is_channel)
