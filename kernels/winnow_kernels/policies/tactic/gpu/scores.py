"""Scoring what can be scored at once: all clusters, and the tokens in no cluster (``selection``)."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.decode.predicted_attention import STEPS
from winnow_kernels.kernel_arguments import Heads
from winnow_kernels.policies.tactic.gpu.contexts import (
    GROUP_BLOCK,
    NOTHING,
    addresses_of,
    count_read,
    group_queries,
    is_idle,
    kept_positions,
    keys_at,
    row_at,
    table_of,
)
from winnow_kernels.policies.tactic.gpu.state import KEPT_BLOCK, TAIL_SPLITS, Attention, Contexts, Kept, Scored
from winnow_kernels.selection.gpu_slots import slots_at

OF_PROGRAM: Final = 256
"""Centroids of a program."""

_OF_PROGRAM = tl.constexpr(OF_PROGRAM)
_TAIL_SPLITS = tl.constexpr(TAIL_SPLITS)
_TOKENS = tl.constexpr(128)
_CENTROIDS = tl.constexpr(64)
_OF_BLOCK = tl.constexpr(KEPT_BLOCK)
_STEPS = tl.constexpr(STEPS)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
# Added to a number below 2^22, it leaves the nearest whole number in the lowest bits.
_MAGIC = tl.constexpr(1.5 * 2**23)
_MAGIC_BITS = tl.constexpr(0x4B400000)
_MAX_STEPS = tl.constexpr(2.0**22 - 1)


@triton.jit  # type: ignore[untyped-decorator]
def score_kernel(  # noqa: PLR0915 - its two halves share most of what they read
    attention: Attention,
    heads: Heads,
    contexts: Contexts,
    counts_ptr: tl.tensor,
    scored: Scored,
    kept: Kept,
    cluster_bytes: tl.tensor,
    key_bytes: tl.tensor,
    in_order: tl.constexpr,
) -> None:
    """Score one split of the centroids, or of the tokens in no cluster, for all query heads of a group.

    The first ``TAIL_SPLITS`` programs of a row and KV head have the tokens, the others the centroids.
    """
    part, kv_head = tl.program_id(0), tl.program_id(1)
    row = row_at(contexts, tl.program_id(2))
    if is_idle(row):
        return
    members = tl.arange(0, GROUP_BLOCK)
    is_head = members < heads.group
    of_kv_head = (row.number * heads.kv_heads + kv_head).to(tl.int64)
    of_heads = of_kv_head * heads.group + members
    queries = group_queries(attention.queries, row, kv_head, heads)
    if part < _TAIL_SPLITS:
        tokens = row.length - row.clustered
        if (part == 0) & (kv_head == 0):
            count_read(counts_ptr, row, row.clusters.to(tl.int64) * cluster_bytes + tokens.to(tl.int64) * key_bytes)
        largest = tl.full((GROUP_BLOCK,), NOTHING, tl.float32)
        mass = tl.zeros((GROUP_BLOCK,), tl.float32)
        for begin in range(part * _TOKENS, tokens, _TAIL_SPLITS * _TOKENS):
            places = begin + tl.arange(0, _TOKENS)
            is_token = places < tokens
            positions = kept_positions(places, row)
            slots = slots_at(table_of(contexts.rows, row), positions, is_token, contexts.rows.page_size)
            keys = keys_at(attention.keys, kv_head, slots, is_token, heads)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * attention.scale_log2
            scores = tl.where(is_token[None, :], scores, NOTHING)
            above = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.where(is_token[None, :], tl.exp2(scores - above[:, None]), 0.0)
            mass = mass * tl.exp2(largest - above) + tl.sum(weights, axis=1)
            largest = above
            if in_order:
                blocks = begin // _OF_BLOCK + tl.arange(0, _TOKENS // _OF_BLOCK)
                tl.store(
                    kept.weights + of_heads[:, None] * kept.blocks + blocks[None, :],
                    _mean_weights(scores, is_token),
                    mask=is_head[:, None] & (blocks * _OF_BLOCK < tokens)[None, :],
                )
        tail_ptr = kept.tails + (of_heads * _TAIL_SPLITS + part) * 2
        tl.store(tail_ptr, largest, mask=is_head)
        tl.store(tail_ptr + 1, mass, mask=is_head)
    else:
        first = (part - _TAIL_SPLITS) * _OF_PROGRAM
        dims = tl.arange(0, heads.dim_block)
        of_all = first + tl.arange(0, _OF_PROGRAM)
        is_one = of_all < row.clusters
        squares = tl.sum(queries.to(tl.float32) * queries.to(tl.float32), axis=1) * attention.scale_of_squares
        addresses_of_all = addresses_of(contexts, row, of_all, is_one, kv_head)
        sizes = tl.load(contexts.tables.sizes + addresses_of_all, mask=is_one, other=0).to(tl.int32)
        firsts = tl.load(contexts.tables.firsts + addresses_of_all, mask=is_one, other=0)
        # So many stages that the next tiles are on their way while one is scored.
        for begin in tl.range(first, tl.minimum(first + _OF_PROGRAM, row.clusters), _CENTROIDS, num_stages=5):
            numbers = begin + tl.arange(0, _CENTROIDS)
            is_cluster = numbers < row.clusters
            addresses = addresses_of(contexts, row, numbers, is_cluster, kv_head)
            centroids = tl.load(
                contexts.tables.centroids + addresses[:, None] * heads.head_dim + dims[None, :],
                mask=is_cluster[:, None] & (dims < heads.head_dim)[None, :],
                other=0.0,
            )
            spreads = tl.load(contexts.tables.spreads + addresses, mask=is_cluster, other=0.0).to(tl.float32)
            members_of = tl.load(contexts.tables.sizes + addresses, mask=is_cluster, other=1).to(tl.int32)
            scores = tl.dot(queries, tl.trans(centroids), input_precision="ieee") * attention.scale_log2
            scores += _gains(squares[:, None] * spreads[None, :], members_of[None, :]) * _LOG2_E
            tl.store(
                scored.steps + of_heads[:, None] * scored.clusters + numbers[None, :],
                _in_steps(scores),
                mask=is_head[:, None] & is_cluster[None, :],
            )
        tl.store(scored.sizes + of_kv_head * scored.clusters + of_all, sizes, mask=is_one)
        tl.store(scored.firsts + of_kv_head * scored.clusters + of_all, firsts, mask=is_one)


@triton.jit  # type: ignore[untyped-decorator]
def _gains(variances: tl.tensor, sizes: tl.tensor) -> tl.tensor:
    """Return what spreading adds to the logarithm of what scores weigh on average (``reference``)."""
    logarithms = tl.log2(tl.maximum(sizes, 1).to(tl.float32)) * _LN_2
    of_greatest = tl.sqrt_rn(2 * variances * logarithms) - logarithms
    return tl.where(variances < 2 * logarithms, variances / 2, of_greatest)


@triton.jit  # type: ignore[untyped-decorator]
def _in_steps(scores: tl.tensor) -> tl.tensor:
    """Return the nearest steps: int32."""
    steps = tl.minimum(tl.maximum(scores * _STEPS, -_MAX_STEPS), _MAX_STEPS)
    return (steps + _MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS


@triton.jit  # type: ignore[untyped-decorator]
def _mean_weights(scores: tl.tensor, is_token: tl.tensor) -> tl.tensor:
    """Return the mean weights of blocks of ``KEPT_BLOCK`` tokens: logarithms, base 2, [heads, blocks].

    Args:
        scores: float32 [heads, tokens], to base 2; ``NOTHING`` where there is no token.
        is_token: bool [tokens].
    """
    blocks: tl.constexpr = scores.shape[1] // _OF_BLOCK
    of_blocks = tl.reshape(scores, (scores.shape[0], blocks, _OF_BLOCK))
    sizes = tl.sum(tl.reshape(is_token.to(tl.float32), (blocks, _OF_BLOCK)), axis=1)
    largest = tl.max(of_blocks, axis=2)
    masses = tl.sum(tl.exp2(of_blocks - largest[:, :, None]), axis=2)
    return largest + tl.log2(masses) - tl.log2(tl.maximum(sizes, 1.0))[None, :]
