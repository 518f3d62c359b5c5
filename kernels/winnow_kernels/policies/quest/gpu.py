"""Quest's selection from the bounds of pages (``reference``), in two launches for each layer.

The first scores the complete pages: it must read a page's bounds once for all query heads of a group, 1 / page size of
the bytes of its keys and values, and writes 4 bytes a page. The second selects, one program for each row and KV head.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.attend.gpu_widening import computable
from winnow_kernels.batch import WHOLE, WHOLE_TO_THE_END, Count, DecodeBatch, DeviceSelection
from winnow_kernels.kernel_arguments import Counts, Heads, Rows, Selected, Vectors
from winnow_kernels.selection.gpu_pages import PageBuffers, page_counts, select_pages, warps_of
from winnow_kernels.selection.gpu_partition import own_share, owner_of, programs_on

# Bytes of maxima, and of minima, that a program loads at once.
_BYTES_AT_ONCE: Final = 16 << 10
# On each multiprocessor: as many as its shared memory holds.
SCORING_PROGRAMS: Final = 3
# The least that the matrix units take: rows of a group beyond its query heads are padding.
_MIN_GROUP: Final = 16
_WHOLE = tl.constexpr(WHOLE)
_TO_THE_END = tl.constexpr(WHOLE_TO_THE_END)
_READ_BYTES = tl.constexpr(int(Count.READ_BYTES))


class QuestRows(NamedTuple):
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
        queries: [rows, query heads, head dim], of the dtype of the bounds, or any that kernels multiply if that is
            narrow; rows and heads may be strided.
        bounds: [pages, KV heads, 2 × head dim], contiguous; ``PageBounds.bounds`` of the layer, valid for the complete
            pages of the kind's rows.
        batch: the batch.
        rows: parameters of its rows.
        selection: what is written to.
        buffers: with one head for each KV head.
    """
    kv_heads = selection.slots.shape[1]
    query_heads, head_dim = queries.shape[1:]
    pages = batch.page_table.shape[1]
    pairs = batch.rows * kv_heads
    assert bounds.is_contiguous()
    heads = Heads.sized(query_heads, kv_heads, head_dim)
    of_rows = (rows, Rows.of(batch), buffers, Selected.of(selection))
    _score_kernel[(programs_on(bounds.device, SCORING_PROGRAMS),)](
        Vectors.of(queries),
        bounds,
        *of_rows,
        heads,
        layer,
        pairs,
        group_block=max(_MIN_GROUP, triton.next_power_of_2(query_heads // kv_heads)),
        block=min(64, _BYTES_AT_ONCE // (triton.next_power_of_2(head_dim) * queries.element_size())),
        pair_block=triton.next_power_of_2(pairs),
        num_warps=4,
    )
    _select_kernel[(batch.rows, kv_heads)](
        *of_rows,
        Counts.of(batch),
        layer,
        2 * head_dim * bounds.element_size(),
        pages=triton.next_power_of_2(pages),
        num_warps=warps_of(pages),
    )


@triton.jit(do_not_specialize=["layer", "pairs"])  # type: ignore[untyped-decorator]
def _score_kernel(
    queries: Vectors,
    bounds_ptr: tl.tensor,
    parameters: QuestRows,
    rows: Rows,
    buffers: PageBuffers,
    selected: Selected,
    heads: Heads,
    layer: tl.tensor,
    pairs: tl.tensor,
    group_block: tl.constexpr,
    block: tl.constexpr,
    pair_block: tl.constexpr,
) -> None:
    """Score the complete pages; a pair is a row and a KV head, number row × KV heads + KV head."""
    all_pairs = tl.arange(0, pair_block)
    all_rows = all_pairs // heads.kv_heads
    in_batch = all_pairs < pairs
    budgets = tl.load(parameters.budgets + all_rows, mask=in_batch, other=0)
    full_layers = tl.load(parameters.full_layers + all_rows, mask=in_batch, other=0)
    lengths = tl.load(rows.lengths + all_rows, mask=in_batch, other=1)
    _, tokens = page_counts(lengths, budgets, rows.page_size)
    selects = (budgets > 0) & (layer >= full_layers) & (tokens <= selected.width)
    blocks = tl.where(selects, tl.cdiv((lengths - 1) // rows.page_size, block), 0)
    channel = tl.arange(0, heads.dim_block)
    is_channel = channel < heads.head_dim
    member = tl.arange(0, group_block)
    is_member = member < heads.group
    part, end = own_share(blocks)
    while part < end:
        pair, first, after = owner_of(part, blocks)
        row = (pair // heads.kv_heads).to(tl.int64)
        head = pair % heads.kv_heads
        query = tl.load(
            queries.pointer
            + row * queries.row_stride
            + (head * heads.group + member)[None, :] * queries.head_stride
            + channel[:, None],
            mask=is_channel[:, None] & is_member[None, :],
            other=0.0,
        )
        query = computable(query, bounds_ptr.dtype.element_ty)
        # A channel's maximum counts where the query is positive, its minimum where it is negative.
        positive = tl.where(query > 0, query, 0.0).to(query.dtype)
        negative = tl.where(query < 0, query, 0.0).to(query.dtype)
        complete = (tl.load(rows.lengths + row) - 1) // rows.page_size
        own_table_ptr = rows.page_table + row * rows.table_stride
        own_bounds_ptr = bounds_ptr + head * 2 * heads.head_dim
        own_scores_ptr = buffers.scores + pair.to(tl.int64) * buffers.width
        for number in tl.range(part - first, tl.minimum(end, after) - first, num_stages=3):
            place = number * block + tl.arange(0, block)
            is_complete = place < complete
            page = tl.load(own_table_ptr + place, mask=is_complete, other=0).to(tl.int64)
            maxima_ptr = own_bounds_ptr + (page * (heads.kv_heads * 2 * heads.head_dim))[:, None] + channel[None, :]
            is_bound = is_complete[:, None] & is_channel[None, :]
            maxima = tl.load(maxima_ptr, mask=is_bound, other=0.0).to(query.dtype)
            minima = tl.load(maxima_ptr + heads.head_dim, mask=is_bound, other=0.0).to(query.dtype)
            upper = tl.dot(maxima, positive, input_precision="ieee")
            upper = tl.dot(minima, negative, upper, input_precision="ieee")
            promise = tl.max(tl.where(is_member[None, :], upper, -float("inf")), axis=1)
            tl.store(own_scores_ptr + place, promise, mask=is_complete)
        part = tl.minimum(end, after)


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def _select_kernel(
    parameters: QuestRows,
    rows: Rows,
    buffers: PageBuffers,
    selected: Selected,
    counts: Counts,
    layer: tl.tensor,
    bounds_bytes: tl.tensor,
    pages: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    budget = tl.load(parameters.budgets + row)
    if budget == 0:
        return
    row_and_head = row * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(rows.lengths + row)
    kept, tokens = page_counts(length, budget, rows.page_size)
    is_full = layer < tl.load(parameters.full_layers + row)
    if is_full | (tokens > selected.width):
        tl.store(selected.counts + row_and_head, tl.where(is_full, _TO_THE_END, _WHOLE))
        return
    tl.store(selected.counts + row_and_head, tokens)
    scored = ((length - 1) // rows.page_size).to(tl.int64)
    tl.atomic_add(counts.pointer + row * counts.row_stride + _READ_BYTES, scored * bounds_bytes, sem="relaxed")
    sinks = tl.load(parameters.sinks + row)
    is_ordered = tl.load(parameters.by_score + row) != 0
    select_pages(rows, row, buffers, selected, row_and_head, length, kept, 1, sinks, is_ordered, 1, pages)
