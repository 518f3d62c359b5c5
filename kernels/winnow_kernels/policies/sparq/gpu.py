"""SparQ's scores (``reference.SparQStep``).

Scoring reads every key before the newest page. Queries, with all but their largest channels set to 0, are made before
that in torch. ``select_top`` takes scores between −1 and 1: a score x is written as x / (1 + |x|), in the same order.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import DecodeBatch, DeviceSelection
from winnow_kernels.cache import LayerCache
from winnow_kernels.policies.sparq.reference import largest_channels
from winnow_kernels.selection.gpu_partition import own_share, owner_of, programs_on
from winnow_kernels.selection.gpu_top import BINS, TopBuffers, TopRows, bin_of, select_top, token_counts

_BINS = tl.constexpr(BINS)
_KEYS_AT_ONCE: Final = 32
# On each multiprocessor.
SCORING_PROGRAMS: Final = 4


def select(
    queries: Tensor,
    cache: LayerCache,
    batch: DecodeBatch,
    rows: TopRows,
    channels: Tensor,
    selection: DeviceSelection,
    buffers: TopBuffers,
    *,
    any_by_score: bool,
) -> None:
    """Write the slots and counts of the rows of this kind in a layer, and count the keys that are read.

    What order they are in, ``select_top`` says.

    Args:
        queries: [rows, query heads, head dim]; rows and heads may be strided.
        cache: the layer's KV cache.
        batch: the batch.
        rows: parameters of its rows.
        channels: int32 [rows]; how many channels of the queries score.
        selection: what is written to.
        buffers: scratch.
        any_by_score: whether ``rows.by_score`` may be set for any row.
    """
    _, kv_heads, width = selection.slots.shape
    query_heads, head_dim = queries.shape[1:]
    group = query_heads // kv_heads
    kept = largest_channels(queries.unflatten(1, (kv_heads, group)), channels).contiguous()
    pairs = batch.rows * kv_heads
    _score_kernel[(programs_on(cache.keys.device, SCORING_PROGRAMS),)](
        kept,
        cache.keys,
        rows.budgets,
        rows.sinks,
        batch.page_table,
        batch.lengths,
        buffers.scores,
        buffers.histograms,
        pairs,
        cache.keys.stride(0),
        cache.keys.stride(1),
        batch.page_table.stride(0),
        buffers.scores.shape[2],
        width,
        page_size=batch.page_size,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        dim_block=triton.next_power_of_2(head_dim),
        block=_KEYS_AT_ONCE,
        pair_block=triton.next_power_of_2(pairs),
        num_warps=4,
    )
    select_top(batch, rows, selection, buffers, cache.vector_bytes, any_by_score=any_by_score)


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def _score_kernel(
    queries_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    budgets_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    histograms_ptr: tl.tensor,
    pairs: tl.tensor,
    slot_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    table_stride: tl.tensor,
    longest: tl.tensor,
    width: tl.tensor,
    page_size: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    block: tl.constexpr,
    pair_block: tl.constexpr,
) -> None:
    """Score the keys before the newest page; a pair is a row and a KV head, number row × KV heads + KV head."""
    all_pairs = tl.arange(0, pair_block)
    all_rows, in_batch = all_pairs // kv_heads, all_pairs < pairs
    earlier, _, wanted, count = token_counts(lengths_ptr, budgets_ptr, sinks_ptr, all_rows, in_batch, page_size)
    blocks = tl.where((wanted >= 0) & (count <= width), tl.cdiv(earlier, block), 0)
    channel = tl.arange(0, dim_block)
    is_channel = channel < head_dim
    part, end = own_share(blocks)
    for each in range(part, end):
        pair, first, _after = owner_of(each, blocks)
        row = (pair // kv_heads).to(tl.int64)
        head = pair % kv_heads
        scored = (tl.load(lengths_ptr + row) - 1) // page_size * page_size
        place = (each - first) * block + tl.arange(0, block)
        is_scored = (place >= tl.load(sinks_ptr + row)) & (place < scored)
        page = tl.load(page_table_ptr + row * table_stride + place // page_size, mask=is_scored, other=0)
        slot = (page * page_size + place % page_size).to(tl.int64)
        keys = tl.load(
            keys_ptr + head * kv_head_stride + (slot * slot_stride)[:, None] + channel[None, :],
            mask=is_scored[:, None] & is_channel[None, :],
            other=0.0,
        ).to(tl.float32)
        best = tl.full([block], -float("inf"), tl.float32)
        for member in range(group):
            own_query_ptr = queries_ptr + (pair.to(tl.int64) * group + member) * head_dim
            query = tl.load(own_query_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
            best = tl.maximum(best, tl.sum(keys * query[None, :], axis=1))
        scores = best / (1.0 + tl.abs(best))
        tl.store(scores_ptr + pair.to(tl.int64) * longest + place, scores, mask=is_scored)
        own_histogram_ptr = histograms_ptr + pair.to(tl.int64) * _BINS
        tl.atomic_add(own_histogram_ptr + bin_of(scores), 1, mask=is_scored, sem="relaxed")
