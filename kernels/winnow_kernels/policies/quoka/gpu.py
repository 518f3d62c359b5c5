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
from winnow_kernels.kernel_arguments import Heads, Rows, Vectors
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
    query_heads = queries.shape[1]
    pairs = batch.rows * cache.kv_heads
    assert reciprocals.is_contiguous()
    _score_kernel[(programs_on(cache.keys.device, SCORING_PROGRAMS),)](
        Vectors.of(queries),
        Vectors.of(cache.keys),
        reciprocals,
        rows,
        Rows.of(batch),
        buffers,
        Heads.of(query_heads, cache),
        pairs,
        selection.slots.shape[2],
        group_block=triton.next_power_of_2(query_heads // cache.kv_heads),
        block=_KEYS_AT_ONCE,
        pair_block=triton.next_power_of_2(pairs),
        num_warps=4,
    )
    key_bytes = cache.vector_bytes + KeyNorms.BYTES
    select_top(batch, rows, selection, buffers, key_bytes, any_by_score=any_by_score)


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def _score_kernel(
    queries: Vectors,
    keys: Vectors,
    reciprocals_ptr: tl.tensor,
    parameters: TopRows,
    rows: Rows,
    buffers: TopBuffers,
    heads: Heads,
    pairs: tl.tensor,
    width: tl.tensor,
    group_block: tl.constexpr,
    block: tl.constexpr,
    pair_block: tl.constexpr,
) -> None:
    """Score the keys before the newest page; a pair is a row and a KV head, number row × KV heads + KV head."""
    all_pairs = tl.arange(0, pair_block)
    all_rows, in_batch = all_pairs // heads.kv_heads, all_pairs < pairs
    earlier, _all_sinks, wanted, count = token_counts(parameters, rows, all_rows, in_batch)
    blocks = tl.where((wanted >= 0) & (count <= width), tl.cdiv(earlier, block), 0)
    member = tl.arange(0, group_block)
    channel = tl.arange(0, heads.dim_block)
    is_channel = channel < heads.head_dim
    part, end = own_share(blocks)
    while part < end:
        pair, first, after = owner_of(part, blocks)
        row = (pair // heads.kv_heads).to(tl.int64)
        head = pair % heads.kv_heads
        query = tl.load(
            queries.pointer
            + row * queries.row_stride
            + (head * heads.group + member)[:, None] * queries.head_stride
            + channel[None, :],
            mask=(member < heads.group)[:, None] & is_channel[None, :],
            other=0.0,
        ).to(tl.float32)
        norms = tl.sqrt(tl.sum(query * query, axis=1))
        mean = tl.sum(query / tl.maximum(norms, _MIN_NORM)[:, None], axis=0) / heads.group
        scored = (tl.load(rows.lengths + row) - 1) // rows.page_size * rows.page_size
        sinks = tl.load(parameters.sinks + row)
        own_table_ptr = rows.page_table + row * rows.table_stride
        own_keys_ptr = keys.pointer + head * keys.head_stride
        own_scores_ptr = buffers.scores + pair.to(tl.int64) * buffers.tokens
        own_histogram_ptr = buffers.histograms + pair.to(tl.int64) * _BINS
        for number in tl.range(part - first, tl.minimum(end, after) - first, num_stages=3):
            place = number * block + tl.arange(0, block)
            is_scored = (place >= sinks) & (place < scored)
            page = tl.load(own_table_ptr + (place >> rows.page_bits), mask=is_scored, other=0)
            slot = ((page << rows.page_bits) + (place & (rows.page_size - 1))).to(tl.int64)
            key = tl.load(
                own_keys_ptr + (slot * keys.row_stride)[:, None] + channel[None, :],
                mask=is_scored[:, None] & is_channel[None, :],
                other=0.0,
            ).to(tl.float32)
            reciprocal = tl.load(reciprocals_ptr + slot * heads.kv_heads + head, mask=is_scored, other=0.0)
            scores = tl.sum(key * mean[None, :], axis=1) * reciprocal
            tl.store(own_scores_ptr + place, scores, mask=is_scored)
            tl.atomic_add(own_histogram_ptr + bin_of(scores), 1, mask=is_scored, sem="relaxed")
        part = tl.minimum(end, after)
