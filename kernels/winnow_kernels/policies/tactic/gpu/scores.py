"""Scoring what can be scored at once: all clusters, and the tokens in no cluster (``selection``)."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.decode.predicted_attention import STEPS
from winnow_kernels.kernel_arguments import Heads
from winnow_kernels.policies.tactic.gpu.contexts import (
    COUNTED,
    GROUP_BLOCK,
    LOWEST_STEP,
    NOTHING,
    Row,
    count_read,
    group_queries,
    is_idle,
    kept_positions,
    keys_at,
    row_at,
    scaled,
    table_of,
    tile_of,
)
from winnow_kernels.policies.tactic.gpu.state import (
    KEPT_BLOCK,
    SCORED,
    TAIL_SPLITS,
    WINDOW,
    Attention,
    Contexts,
    Kept,
    Scored,
)
from winnow_kernels.policies.tactic.reference import DEVIATIONS
from winnow_kernels.selection.gpu_slots import slots_at

MIN_GROUP: Final = 8
"""Query heads of a tile, at least: what tensor cores multiply at once."""

_TAIL_SPLITS = tl.constexpr(TAIL_SPLITS)
_TOKENS = tl.constexpr(64)
_SCORED = tl.constexpr(SCORED)
_WINDOW = tl.constexpr(WINDOW)
_OF_BLOCK = tl.constexpr(KEPT_BLOCK)
_STEPS = tl.constexpr(STEPS)
_DEVIATIONS = tl.constexpr(DEVIATIONS)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
# Added to a number below 2^22, it leaves the nearest whole number in the lowest bits.
_MAGIC = tl.constexpr(1.5 * 2**23)
_MAGIC_BITS = tl.constexpr(0x4B400000)
_MAX_STEPS = tl.constexpr(2.0**15 - 1)


@triton.jit  # type: ignore[untyped-decorator]
def score_kernel(
    attention: Attention,
    heads: Heads,
    contexts: Contexts,
    counts_ptr: tl.tensor,
    scored: Scored,
    kept: Kept,
    cluster_bytes: tl.tensor,
    span_bytes: tl.tensor,
    key_bytes: tl.tensor,
    group_block: tl.constexpr,
    in_order: tl.constexpr,
) -> None:
    """Score a tile of clusters, or one split of the tokens in no cluster, for all query heads of a group.

    The first ``TAIL_SPLITS`` programs of a row and KV head have the tokens, the others the clusters.
    """
    part, kv_head = tl.program_id(0), tl.program_id(1)
    row = row_at(contexts, tl.program_id(2))
    if is_idle(row):
        return
    if part < _TAIL_SPLITS:
        if (part == 0) & (kv_head == 0):
            spans = tl.cdiv(row.clusters, contexts.tables.of_span)
            of_index = row.clusters.to(tl.int64) * cluster_bytes + spans.to(tl.int64) * span_bytes
            count_read(counts_ptr, row, of_index + (row.length - row.clustered).to(tl.int64) * key_bytes)
        _score_tokens(attention, heads, contexts, kept, row, kv_head, part, in_order)
    elif (part - _TAIL_SPLITS) * _SCORED < row.clusters:
        _score_clusters(attention, heads, contexts, scored, row, kv_head, part - _TAIL_SPLITS, group_block)


@triton.jit  # type: ignore[untyped-decorator]
def _score_tokens(
    attention: Attention,
    heads: Heads,
    contexts: Contexts,
    kept: Kept,
    row: Row,
    kv_head: tl.tensor,
    part: tl.tensor,
    in_order: tl.constexpr,
) -> None:
    """Score one split of the tokens in no cluster."""
    members = tl.arange(0, GROUP_BLOCK)
    is_head = members < heads.group
    of_heads = (row.number * heads.kv_heads + kv_head).to(tl.int64) * heads.group + members
    queries = group_queries(attention.queries, row, kv_head, heads, GROUP_BLOCK)
    tokens = row.length - row.clustered
    largest = tl.full((GROUP_BLOCK,), NOTHING, tl.float32)
    mass = tl.zeros((GROUP_BLOCK,), tl.float32)
    for begin in tl.range(part * _TOKENS, tokens, _TAIL_SPLITS * _TOKENS, num_stages=2):
        places = begin + tl.arange(0, _TOKENS)
        is_token = places < tokens
        positions = kept_positions(places, row)
        slots = slots_at(table_of(contexts.rows, row), positions, is_token, contexts.rows.page_size)
        keys = keys_at(attention, kv_head, slots, is_token, heads)
        scores = scaled(attention, tl.dot(queries, tl.trans(keys), input_precision="ieee"))
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


@triton.jit  # type: ignore[untyped-decorator]
def _score_clusters(
    attention: Attention,
    heads: Heads,
    contexts: Contexts,
    scored: Scored,
    row: Row,
    kv_head: tl.tensor,
    tile: tl.tensor,
    group_block: tl.constexpr,
) -> None:
    """Score a tile of clusters, and count the tokens of each step.

    A tile is all that a program has: it is small, so many programs share a multiprocessor, and while one computes the
    centroids of the others are on their way.
    """
    begin = tile * _SCORED
    member, dims = tl.arange(0, group_block), tl.arange(0, heads.dim_block)
    is_head = member < heads.group
    of_heads = (row.number * heads.kv_heads + kv_head).to(tl.int64) * heads.group + member
    number = begin + tl.arange(0, _SCORED)
    is_cluster = number < row.clusters
    queries = group_queries(attention.queries, row, kv_head, heads, group_block)
    base, offset = tile_of(contexts, row, begin, _SCORED, kv_head)
    # What lies behind the last cluster is read with the others, and stays among itself.
    vector = offset[:, None] * heads.head_dim + dims[None, :]
    centroids_ptr = contexts.tables.centroids + base * heads.head_dim
    spreads = tl.load(contexts.tables.spreads + base + offset).to(tl.float32)
    sizes = tl.load(contexts.tables.sizes + base + offset).to(tl.int32)
    if heads.head_dim == heads.dim_block:
        centroids = tl.load(centroids_ptr + vector)
    else:
        centroids = tl.load(centroids_ptr + vector, mask=(dims < heads.head_dim)[None, :], other=0.0)
    # Of a narrow cache they are bfloat16, whatever the queries are.
    scores = scaled(attention, tl.dot(centroids.to(queries.dtype), tl.trans(queries), input_precision="ieee"))
    # How queries' squares are spread over the elements matters as much as how large they are.
    squares = queries.to(tl.float32) * queries.to(tl.float32) * attention.scale_of_squares
    of_span: tl.constexpr = contexts.tables.of_span
    if of_span % _SCORED == 0:
        directions_ptr = contexts.tables.directions + base // of_span * heads.head_dim + dims
        directions = tl.load(directions_ptr, mask=dims < heads.head_dim, other=0.0).to(tl.float32)
        along = tl.sum(squares * directions[None, :], axis=1)[None, :]
    else:
        directions_ptr = contexts.tables.directions + (offset // of_span * heads.head_dim)[:, None] + dims[None, :]
        directions = tl.load(directions_ptr, mask=(dims < heads.head_dim)[None, :], other=0.0).to(tl.float32)
        along = tl.dot(directions, tl.trans(squares), input_precision="ieee")
    is_filled = (is_cluster & (sizes > 0))[:, None]
    variances = spreads[:, None] * along
    if attention.cap_log2 is None:
        predicted = scores + _gains(scores, variances, is_filled)
    else:
        # How steep the cap is where a cluster's mean is: 1 − tanh².
        reached = scores / attention.cap_log2
        steepness = 1.0 - reached * reached
        gains = _gains(scores, variances * steepness * steepness, is_filled)
        predicted = tl.minimum(scores + gains, attention.cap_log2)
    steps = _in_steps(predicted)
    is_any = is_head[None, :] & is_cluster[:, None]
    steps_ptr = scored.steps + of_heads[None, :] * scored.clusters + number[:, None]
    tl.store(steps_ptr, steps.to(tl.int16), mask=is_any)
    is_either = is_filled & is_head[None, :]
    highest = tl.max(tl.where(is_either, steps, LOWEST_STEP), axis=0)
    tl.store(scored.highest + of_heads * (scored.clusters // _SCORED) + tile, highest, mask=is_head)
    # Whole numbers: their sums do not depend on the order.
    tokens_ptr = scored.tokens + of_heads[None, :] * _WINDOW + (steps & (_WINDOW - 1))
    is_counted = is_either & (steps > highest[None, :] - COUNTED)
    tl.atomic_add(tokens_ptr, tl.broadcast_to(sizes[:, None], steps.shape), mask=is_counted, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _gains(scores: tl.tensor, variances: tl.tensor, is_filled: tl.tensor) -> tl.tensor:
    """Return what spreading around their mean adds to the scores of a tile's clusters (``reference``)."""
    greatest = tl.where(is_filled, scores + tl.sqrt(variances) * (_DEVIATIONS * _LOG2_E), NOTHING)
    bounds = tl.max(greatest, axis=0)
    reached = tl.minimum(tl.maximum((bounds[None, :] - scores) * _LN_2, 0.0), variances)
    return (reached - reached * reached / tl.maximum(2 * variances, 1e-30)) * _LOG2_E


@triton.jit  # type: ignore[untyped-decorator]
def _in_steps(scores: tl.tensor) -> tl.tensor:
    """Return the nearest steps, int32; as far as 16 bits go."""
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
