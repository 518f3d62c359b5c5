"""Scoring what can be scored at once: all centroids, and the tokens in no cluster (``selection``)."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.policies.tactic.gpu.search import coarse
from winnow_kernels.policies.tactic.gpu.state import (
    GROUP_BLOCK,
    KEPT_BLOCK,
    NOTHING,
    addresses_of,
    count_read,
    group_queries,
    is_idle,
    kept_positions,
    keys_at,
    shape_of,
    slots_at,
)

OF_PROGRAM: Final = 256
"""Centroids of a program."""

_TOKENS = tl.constexpr(128)
_CENTROIDS = tl.constexpr(64)
_OF_BLOCK = tl.constexpr(KEPT_BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def score_kernel(
    queries_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    centroids_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    clustered_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    caps_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    cluster_sizes_ptr: tl.tensor,
    cluster_firsts_ptr: tl.tensor,
    tails_ptr: tl.tensor,
    kept_weights_ptr: tl.tensor,
    scale_log2: tl.tensor,
    query_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    entries_stride: tl.tensor,
    capacity: tl.tensor,
    entry_bytes: tl.tensor,
    key_bytes: tl.tensor,
    clusters: tl.tensor,
    kept_blocks: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    page_size: tl.constexpr,
    span: tl.constexpr,
    of_span: tl.constexpr,
    of_program: tl.constexpr,
    tail_splits: tl.constexpr,
    in_order: tl.constexpr,
) -> None:
    """Score one split of the centroids, or of the tokens in no cluster, for all query heads of a group.

    The first ``tail_splits`` programs of a row and KV head have the tokens, the others the centroids.
    """
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share, cap = tl.load(shares_ptr + row), tl.load(caps_ptr + row)
    length, sinks, clustered, count = shape_of(lengths_ptr, clustered_ptr, sinks_ptr, row, span, of_span)
    if is_idle(share, length, clustered, cap):
        return
    heads = tl.arange(0, GROUP_BLOCK)
    of_kv_head = (row * kv_heads + kv_head).to(tl.int64)
    of_heads = of_kv_head * group + heads
    queries = group_queries(queries_ptr, row, kv_head, query_stride, group, head_dim, dim_block)
    if part < tail_splits:
        kept = length - clustered
        if (part == 0) & (kv_head == 0):
            spans = count // of_span
            count_read(counts_ptr, row, spans.to(tl.int64) * entry_bytes + kept.to(tl.int64) * key_bytes)
        largest = tl.full((GROUP_BLOCK,), NOTHING, tl.float32)
        mass = tl.zeros((GROUP_BLOCK,), tl.float32)
        for begin in range(part * _TOKENS, kept, tail_splits * _TOKENS):
            places = begin + tl.arange(0, _TOKENS)
            is_token = places < kept
            positions = kept_positions(places, length, sinks)
            slots = slots_at(table_ptr + row * table_stride, positions, is_token, page_size)
            keys = keys_at(keys_ptr + kv_head * head_stride, slots, is_token, slot_stride, head_dim, dim_block)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
            scores = tl.where(is_token[None, :], scores, NOTHING)
            above = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.where(is_token[None, :], tl.exp2(scores - above[:, None]), 0.0)
            mass = mass * tl.exp2(largest - above) + tl.sum(weights, axis=1)
            largest = above
            if in_order:
                blocks = begin // _OF_BLOCK + tl.arange(0, _TOKENS // _OF_BLOCK)
                tl.store(
                    kept_weights_ptr + of_heads[:, None] * kept_blocks + blocks[None, :],
                    _mean_weights(scores, is_token),
                    mask=(heads < group)[:, None] & (blocks * _OF_BLOCK < kept)[None, :],
                )
        tail_ptr = tails_ptr + (of_heads * tail_splits + part) * 2
        tl.store(tail_ptr, largest, mask=heads < group)
        tl.store(tail_ptr + 1, mass, mask=heads < group)
    else:
        first = (part - tail_splits) * of_program
        dims = tl.arange(0, dim_block)
        entries_ptr += row * entries_stride
        of_all = first + tl.arange(0, of_program)
        addresses_of_all = addresses_of(entries_ptr, of_all, of_all < count, kv_head, capacity, of_span)
        sizes = tl.load(sizes_ptr + addresses_of_all, mask=of_all < count, other=0).to(tl.int32)
        firsts = tl.load(firsts_ptr + addresses_of_all, mask=of_all < count, other=0)
        # So many stages that the next tiles are on their way while one is scored.
        for begin in tl.range(first, tl.minimum(first + of_program, count), _CENTROIDS, num_stages=5):
            numbers = begin + tl.arange(0, _CENTROIDS)
            is_cluster = numbers < count
            addresses = addresses_of(entries_ptr, numbers, is_cluster, kv_head, capacity, of_span)
            centroids = tl.load(
                centroids_ptr + addresses[:, None] * head_dim + dims[None, :],
                mask=is_cluster[:, None] & (dims < head_dim)[None, :],
                other=0.0,
            )
            scores = tl.dot(queries, tl.trans(centroids), input_precision="ieee")
            tl.store(
                scores_ptr + of_heads[:, None] * clusters + numbers[None, :],
                coarse(scores),
                mask=(heads < group)[:, None] & is_cluster[None, :],
            )
        tl.store(cluster_sizes_ptr + of_kv_head * clusters + of_all, sizes, mask=of_all < count)
        tl.store(cluster_firsts_ptr + of_kv_head * clusters + of_all, firsts, mask=of_all < count)


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
