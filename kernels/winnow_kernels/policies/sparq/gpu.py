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
from winnow_kernels.kernel_arguments import Heads, Rows, Vectors
from winnow_kernels.policies.sparq.reference import largest_channels
from winnow_kernels.selection.gpu_partition import own_share, owner_of, programs_on
from winnow_kernels.selection.gpu_slots import slots_at
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
    query_heads = queries.shape[1]
    kept = largest_channels(queries.unflatten(1, (cache.kv_heads, -1)), channels).contiguous()
    pairs = batch.rows * cache.kv_heads
    _score_kernel[(programs_on(cache.keys.device, SCORING_PROGRAMS),)](
        kept,
        Vectors.of(cache.keys),
        rows,
        Rows.of(batch),
        buffers,
        Heads.of(query_heads, cache),
        pairs,
        selection.slots.shape[2],
        block=_KEYS_AT_ONCE,
        pair_block=triton.next_power_of_2(pairs),
        num_warps=4,
    )
    select_top(batch, rows, selection, buffers, cache.vector_bytes, any_by_score=any_by_score)


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def _score_kernel(
    queries_ptr: tl.tensor,
    keys: Vectors,
    parameters: TopRows,
    rows: Rows,
    buffers: TopBuffers,
    heads: Heads,
    pairs: tl.tensor,
    width: tl.tensor,
    block: tl.constexpr,
    pair_block: tl.constexpr,
) -> None:
    """Score the keys before the newest page; a pair is a row and a KV head, number row × KV heads + KV head."""
    all_pairs = tl.arange(0, pair_block)
    all_rows, in_batch = all_pairs // heads.kv_heads, all_pairs < pairs
    earlier, _, wanted, count = token_counts(parameters, rows, all_rows, in_batch)
    blocks = tl.where((wanted >= 0) & (count <= width), tl.cdiv(earlier, block), 0)
    channel = tl.arange(0, heads.dim_block)
    is_channel = channel < heads.head_dim
    part, end = own_share(blocks)
    for each in range(part, end):
        pair, first, _after = owner_of(each, blocks)
        row = (pair // heads.kv_heads).to(tl.int64)
        head = pair % heads.kv_heads
        scored = (tl.load(rows.lengths + row) - 1) // rows.page_size * rows.page_size
        place = (each - first) * block + tl.arange(0, block)
        is_scored = (place >= tl.load(parameters.sinks + row)) & (place < scored)
        slot = slots_at(rows.page_table + row * rows.table_stride, place, is_scored, rows.page_size).to(tl.int64)
        key = tl.load(
            keys.pointer + head * keys.head_stride + (slot * keys.row_stride)[:, None] + channel[None, :],
            mask=is_scored[:, None] & is_channel[None, :],
            other=0.0,
        ).to(tl.float32)
        best = tl.full([block], -float("inf"), tl.float32)
        for member in range(heads.group):
            own_query_ptr = queries_ptr + (pair.to(tl.int64) * heads.group + member) * heads.head_dim
            query = tl.load(own_query_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
            best = tl.maximum(best, tl.sum(key * query[None, :], axis=1))
        scores = best / (1.0 + tl.abs(best))
        tl.store(buffers.scores + pair.to(tl.int64) * buffers.tokens + place, scores, mask=is_scored)
        own_histogram_ptr = buffers.histograms + pair.to(tl.int64) * _BINS
        tl.atomic_add(own_histogram_ptr + bin_of(scores), 1, mask=is_scored, sem="relaxed")
