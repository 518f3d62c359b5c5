"""Quest's selection from the bounds of pages (``reference``), in two launches for each layer.

The first scores the complete pages: it must read a page's bounds once for all query heads of a group, 1 / page size of
the bytes of its keys and values, and writes 4 bytes a page. The second selects, one program for each row and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import WHOLE, WHOLE_TO_THE_END, Count, DecodeBatch, DeviceSelection
from winnow_kernels.selection.gpu_pages import PageBuffers, page_counts, select_pages, warps_of
from winnow_kernels.selection.gpu_partition import own_share, owner_of, programs_on

# Bytes of maxima, and of minima, that a program loads at once.
_BYTES_AT_ONCE: Final = 16 << 10
# On each multiprocessor: as many as its shared memory holds.
SCORING_PROGRAMS: Final = 3
# The least that the matrix units take: rows of a group beyond its query heads are padding.
_MIN_GROUP: Final = 16


@dataclass(frozen=True, eq=False)
class QuestRows:
    """The parameters of a batch's rows.

    Attributes:
        budgets: int32 [rows]; pages for each KV head, no fewer than those of the sinks and the newest; 0 for a row of
            another kind.
        sinks: int32 [rows]; first tokens, whose pages are always kept.
        full_layers: int32 [rows]; how many of the first layers attend to everything.
        by_score: int32 [rows]; not 0 where pages must come by descending score, as early termination needs them.
    """

    budgets: Tensor
    sinks: Tensor
    full_layers: Tensor
    by_score: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> QuestRows:
        """Return the parameters of ``rows`` rows of other kinds."""
        return cls(*torch.zeros(4, rows, dtype=torch.int32, device=device))


def select(
    layer: int,
    queries: Tensor,
    bounds: Tensor,
    batch: DecodeBatch,
    rows: QuestRows,
    selection: DeviceSelection,
    buffers: PageBuffers,
) -> None:
    """Write the slots and counts of the kind's rows in ``layer``, and count the bounds that are read.

    A row whose selection is wider than there is room for attends to its whole context.

    Args:
        layer: the layer's number.
        queries: [rows, query heads, head dim], of the dtype of the bounds; rows and heads may be strided.
        bounds: [pages, KV heads, 2 × head dim], contiguous; ``PageBounds.bounds`` of the layer, valid for the complete
            pages of the kind's rows.
        batch: the batch.
        rows: parameters of its rows.
        selection: what is written to.
        buffers: with one head for each KV head.
    """
    _, kv_heads, width = selection.slots.shape
    query_heads, head_dim = queries.shape[1:]
    pages = batch.page_table.shape[1]
    group = query_heads // kv_heads
    dim_block = triton.next_power_of_2(head_dim)
    pairs = batch.rows * kv_heads
    assert selection.slots.is_contiguous()
    assert bounds.is_contiguous()
    _score_kernel[(programs_on(bounds.device, SCORING_PROGRAMS),)](
        queries,
        bounds,
        rows.budgets,
        rows.full_layers,
        batch.page_table,
        batch.lengths,
        buffers.scores,
        layer,
        pairs,
        queries.stride(0),
        queries.stride(1),
        batch.page_table.stride(0),
        buffers.scores.shape[2],
        width,
        page_size=batch.page_size,
        kv_heads=kv_heads,
        group=group,
        group_block=max(_MIN_GROUP, triton.next_power_of_2(group)),
        head_dim=head_dim,
        dim_block=dim_block,
        block=min(64, _BYTES_AT_ONCE // (dim_block * bounds.element_size())),
        pair_block=triton.next_power_of_2(pairs),
        num_warps=4,
    )
    _select_kernel[(batch.rows, kv_heads)](
        rows.budgets,
        rows.sinks,
        rows.full_layers,
        rows.by_score,
        batch.page_table,
        batch.lengths,
        buffers.scores,
        buffers.lists,
        selection.slots,
        selection.counts,
        batch.counts,
        layer,
        batch.page_table.stride(0),
        buffers.scores.shape[2],
        width,
        batch.counts.stride(0),
        2 * head_dim * bounds.element_size(),
        bytes_column=Count.READ_BYTES,
        whole=WHOLE,
        to_the_end=WHOLE_TO_THE_END,
        page_size=batch.page_size,
        pages=triton.next_power_of_2(pages),
        num_warps=warps_of(pages),
    )


@triton.jit(do_not_specialize=["layer", "pairs"])  # type: ignore[untyped-decorator]
def _score_kernel(
    queries_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    budgets_ptr: tl.tensor,
    full_layers_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    layer: tl.tensor,
    pairs: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    table_stride: tl.tensor,
    buffer_pages: tl.tensor,
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
    """Score the complete pages; a pair is a row and a KV head, number row × KV heads + KV head."""
    all_pairs = tl.arange(0, pair_block)
    all_rows = all_pairs // kv_heads
    in_batch = all_pairs < pairs
    budgets = tl.load(budgets_ptr + all_rows, mask=in_batch, other=0)
    full_layers = tl.load(full_layers_ptr + all_rows, mask=in_batch, other=0)
    lengths = tl.load(lengths_ptr + all_rows, mask=in_batch, other=1)
    _, tokens = page_counts(lengths, budgets, page_size)
    selects = (budgets > 0) & (layer >= full_layers) & (tokens <= width)
    blocks = tl.where(selects, tl.cdiv((lengths - 1) // page_size, block), 0)
    channel = tl.arange(0, dim_block)
    is_channel = channel < head_dim
    member = tl.arange(0, group_block)
    is_member = member < group
    part, end = own_share(blocks)
    while part < end:
        pair, first, after = owner_of(part, blocks)
        row = (pair // kv_heads).to(tl.int64)
        head = pair % kv_heads
        queries = tl.load(
            queries_ptr
            + row * query_row_stride
            + (head * group + member)[None, :] * query_head_stride
            + channel[:, None],
            mask=is_channel[:, None] & is_member[None, :],
            other=0.0,
        )
        # A channel's maximum counts where the query is positive, its minimum where it is negative.
        positive = tl.where(queries > 0, queries, 0.0).to(queries.dtype)
        negative = tl.where(queries < 0, queries, 0.0).to(queries.dtype)
        complete = (tl.load(lengths_ptr + row) - 1) // page_size
        own_table_ptr = page_table_ptr + row * table_stride
        own_bounds_ptr = bounds_ptr + head * 2 * head_dim
        own_scores_ptr = scores_ptr + pair.to(tl.int64) * buffer_pages
        for number in tl.range(part - first, tl.minimum(end, after) - first, num_stages=3):
            place = number * block + tl.arange(0, block)
            is_complete = place < complete
            page = tl.load(own_table_ptr + place, mask=is_complete, other=0).to(tl.int64)
            maxima_ptr = own_bounds_ptr + (page * (kv_heads * 2 * head_dim))[:, None] + channel[None, :]
            is_bound = is_complete[:, None] & is_channel[None, :]
            maxima = tl.load(maxima_ptr, mask=is_bound, other=0.0)
            minima = tl.load(maxima_ptr + head_dim, mask=is_bound, other=0.0)
            upper = tl.dot(maxima, positive, input_precision="ieee")
            upper = tl.dot(minima, negative, upper, input_precision="ieee")
            promise = tl.max(tl.where(is_member[None, :], upper, -float("inf")), axis=1)
            tl.store(own_scores_ptr + place, promise, mask=is_complete)
        part = tl.minimum(end, after)


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def _select_kernel(
    budgets_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    full_layers_ptr: tl.tensor,
    by_score_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    lists_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    read_ptr: tl.tensor,
    layer: tl.tensor,
    table_stride: tl.tensor,
    buffer_pages: tl.tensor,
    width: tl.tensor,
    read_stride: tl.tensor,
    bounds_bytes: tl.tensor,
    bytes_column: tl.constexpr,
    whole: tl.constexpr,
    to_the_end: tl.constexpr,
    page_size: tl.constexpr,
    pages: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    budget = tl.load(budgets_ptr + row)
    if budget == 0:
        return
    row_and_head = row * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    kept, tokens = page_counts(length, budget, page_size)
    is_full = layer < tl.load(full_layers_ptr + row)
    if is_full | (tokens > width):
        tl.store(counts_ptr + row_and_head, tl.where(is_full, to_the_end, whole))
        return
    tl.store(counts_ptr + row_and_head, tokens)
    scored = ((length - 1) // page_size).to(tl.int64)
    tl.atomic_add(read_ptr + row * read_stride + bytes_column, scored * bounds_bytes, sem="relaxed")
    select_pages(
        scores_ptr + row_and_head * buffer_pages,
        lists_ptr + row_and_head * buffer_pages,
        page_table_ptr + row * table_stride,
        slots_ptr + row_and_head * width,
        length,
        kept,
        1,
        tl.load(sinks_ptr + row),
        tl.load(by_score_ptr + row) != 0,
        1,
        0,
        page_size,
        pages,
    )
