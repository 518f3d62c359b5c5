"""QUOKA's selection in decode (``reference.QuokaStep``).

Scoring reads every key before the newest page and its reciprocal norm: half of the bytes of dense attention, so that a
step is never twice as fast. Then ``select_top`` selects.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import DecodeBatch, DeviceSelection
from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.key_norms import KeyNorms
from winnow_kernels.selection.gpu_partition import own_share, owner_of, programs_on
from winnow_kernels.selection.gpu_top import BINS, TopBuffers, TopRows, bin_of, select_top, token_counts

_BINS = tl.constexpr(BINS)
# As torch.nn.functional.normalize.
_MIN_NORM = tl.constexpr(1e-12)
_KEYS_AT_ONCE: Final = 64
# On each multiprocessor.
SCORING_PROGRAMS: Final = 5


def select(
    queries: Tensor,
    cache: LayerCache,
    reciprocals: Tensor,
    batch: DecodeBatch,
    rows: TopRows,
    selection: DeviceSelection,
    buffers: TopBuffers,
    *,
    any_by_score: bool,
) -> None:
    """Write the slots and counts of the rows of this kind in a layer, and count the keys and norms that are read.

    What order they are in, ``select_top`` says.

    Args:
        queries: [rows, query heads, head dim]; rows and heads may be strided.
        cache: the layer's KV cache.
        reciprocals: float32 [slots, KV heads], contiguous; ``KeyNorms.reciprocals`` of the layer, valid for the
            complete pages of the rows of this kind.
        batch: the batch.
        rows: parameters of its rows.
        selection: what is written to.
        buffers: scratch.
        any_by_score: whether ``rows.by_score`` may be set for any row.
    """
    _, kv_heads, width = selection.slots.shape
    query_heads, head_dim = queries.shape[1:]
    group = query_heads // kv_heads
    longest = buffers.scores.shape[2]
    pairs = batch.rows * kv_heads
    assert selection.slots.is_contiguous()
    assert reciprocals.is_contiguous()
    shape = {
        "page_size": batch.page_size,
        "kv_heads": kv_heads,
        "pair_block": triton.next_power_of_2(pairs),
    }
    _score_kernel[(programs_on(cache.keys.device, SCORING_PROGRAMS),)](
        queries,
        cache.keys,
        reciprocals,
        rows.budgets,
        rows.sinks,
        batch.page_table,
        batch.lengths,
        buffers.scores,
        buffers.histograms,
        pairs,
        queries.stride(0),
        queries.stride(1),
        cache.keys.stride(0),
        cache.keys.stride(1),
        batch.page_table.stride(0),
        longest,
        width,
        group=group,
        group_block=triton.next_power_of_2(group),
        head_dim=head_dim,
        dim_block=triton.next_power_of_2(head_dim),
        block=_KEYS_AT_ONCE,
        **shape,
        num_warps=4,
    )
    key_bytes = cache.vector_bytes + KeyNorms.BYTES
    select_top(batch, rows, selection, buffers, key_bytes, any_by_score=any_by_score)


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def _score_kernel(
    queries_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    reciprocals_ptr: tl.tensor,
    budgets_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    histograms_ptr: tl.tensor,
    pairs: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    table_stride: tl.tensor,
    longest: tl.tensor,
    width: tl.tensor,
    page_size: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    group_block: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    block: tl.constexpr,
    pair_block: tl.constexpr,
) -> None:
    """Score the keys before the newest page; a pair is a row and a KV head, number row × KV heads + KV head."""
    page_bits: tl.constexpr = page_size.bit_length() - 1
    all_pairs = tl.arange(0, pair_block)
    all_rows, in_batch = all_pairs // kv_heads, all_pairs < pairs
    earlier, _all_sinks, wanted, count = token_counts(
        lengths_ptr, budgets_ptr, sinks_ptr, all_rows, in_batch, page_size
    )
    blocks = tl.where((wanted >= 0) & (count <= width), tl.cdiv(earlier, block), 0)
    member = tl.arange(0, group_block)
    channel = tl.arange(0, dim_block)
    is_channel = channel < head_dim
    part, end = own_share(blocks)
    while part < end:
        pair, first, after = owner_of(part, blocks)
        row = (pair // kv_heads).to(tl.int64)
        head = pair % kv_heads
        queries = tl.load(
            queries_ptr
            + row * query_row_stride
            + (head * group + member)[:, None] * query_head_stride
            + channel[None, :],
            mask=(member < group)[:, None] & is_channel[None, :],
            other=0.0,
        ).to(tl.float32)
        norms = tl.sqrt(tl.sum(queries * queries, axis=1))
        mean = tl.sum(queries / tl.maximum(norms, _MIN_NORM)[:, None], axis=0) / group
        scored = (tl.load(lengths_ptr + row) - 1) // page_size * page_size
        sinks = tl.load(sinks_ptr + row)
        own_table_ptr = page_table_ptr + row * table_stride
        own_keys_ptr = keys_ptr + head * kv_head_stride
        own_scores_ptr = scores_ptr + pair.to(tl.int64) * longest
        own_histogram_ptr = histograms_ptr + pair.to(tl.int64) * _BINS
        for number in tl.range(part - first, tl.minimum(end, after) - first, num_stages=3):
            place = number * block + tl.arange(0, block)
            is_scored = (place >= sinks) & (place < scored)
            page = tl.load(own_table_ptr + (place >> page_bits), mask=is_scored, other=0)
            slot = ((page << page_bits) + (place & (page_size - 1))).to(tl.int64)
            keys = tl.load(
                own_keys_ptr + (slot * slot_stride)[:, None] + channel[None, :],
                mask=is_scored[:, None] & is_channel[None, :],
                other=0.0,
            ).to(tl.float32)
            reciprocal = tl.load(reciprocals_ptr + slot * kv_heads + head, mask=is_scored, other=0.0)
            scores = tl.sum(keys * mean[None, :], axis=1) * reciprocal
            tl.store(own_scores_ptr + place, scores, mask=is_scored)
            tl.atomic_add(own_histogram_ptr + bin_of(scores), 1, mask=is_scored, sem="relaxed")
        part = tl.minimum(end, after)
