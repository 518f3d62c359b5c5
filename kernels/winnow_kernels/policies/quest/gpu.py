"""Quest's selection from the bounds of pages (``reference``), in two launches for each layer.

The first scores the complete pages: it must read a page's bounds once for all query heads of a group, 1 / page size of
the bytes of its keys and values, and writes 4 bytes for each page and query head. The second, one program for each row
and KV head, reads these for the softmax of each query head, and selects.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

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
# Below any score, but finite: a context of one page has no scores.
_LOWEST = tl.constexpr(-1e30)
_LOG2_E: Final = 1.4426950408889634


class QuestBuffers(NamedTuple):
    """Scratch of the selector, the same in all layers.

    Attributes:
        pages: what each KV head's pages promise, and those selected.
        upper: float32 [rows, query heads, pages]; upper scores, before scaling.
    """

    pages: PageBuffers
    upper: Tensor

    @classmethod
    def empty(cls, rows: int, kv_heads: int, query_heads: int, pages: int, device: torch.device) -> QuestBuffers:
        """Return buffers for contexts of ``pages`` pages.

        Raises:
            ValueError: these are more than ``MAX_PAGES``.
        """
        buffers = PageBuffers.empty(rows, kv_heads, pages, device)
        return cls(buffers, torch.zeros(rows, query_heads, pages, dtype=torch.float32, device=device))

    @staticmethod
    def bytes_of_row(kv_heads: int, query_heads: int, pages: int) -> int:
        """Return the bytes of a row's buffers."""
        return (8 * kv_heads + 4 * query_heads) * pages


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
    buffers: QuestBuffers,
    scale: float,
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
        buffers: scratch.
        scale: what upper scores are multiplied by before the softmax.
    """
    kv_heads = selection.slots.shape[1]
    query_heads, head_dim = queries.shape[1:]
    pages = batch.page_table.shape[1]
    pairs = batch.rows * kv_heads
    assert bounds.is_contiguous()
    heads = Heads.sized(query_heads, kv_heads, head_dim)
    of_rows = (rows, Rows.of(batch), buffers.pages, buffers.upper, Selected.of(selection))
    _score_kernel[(programs_on(bounds.device, SCORING_PROGRAMS),)](
        Vectors.of(queries),
        bounds,
        *of_rows,
        heads,
        layer,
        pairs,
        group_block=max(_MIN_GROUP, triton.next_power_of_2(query_heads // kv_heads)),
        block=min(64, _BYTES_AT_ONCE // (triton.next_power_of_2(head_dim) * bounds.element_size())),
        pair_block=triton.next_power_of_2(pairs),
        num_warps=4,
    )
    _select_kernel[(batch.rows, kv_heads)](
        *of_rows,
        Counts.of(batch),
        layer,
        2 * head_dim * bounds.element_size(),
        scale * _LOG2_E,
        group=query_heads // kv_heads,
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
    upper_ptr: tl.tensor,
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
        # A channel's maximum counts where the query is positive, its minimum where it is negative.
        positive = tl.where(query > 0, query, 0.0).to(query.dtype)
        negative = tl.where(query < 0, query, 0.0).to(query.dtype)
        complete = (tl.load(rows.lengths + row) - 1) // rows.page_size
        own_table_ptr = rows.page_table + row * rows.table_stride
        own_bounds_ptr = bounds_ptr + head * 2 * heads.head_dim
        own_upper_ptr = upper_ptr + pair.to(tl.int64) * heads.group * buffers.width
        for number in tl.range(part - first, tl.minimum(end, after) - first, num_stages=3):
            place = number * block + tl.arange(0, block)
            is_complete = place < complete
            page = tl.load(own_table_ptr + place, mask=is_complete, other=0).to(tl.int64)
            maxima_ptr = own_bounds_ptr + (page * (heads.kv_heads * 2 * heads.head_dim))[:, None] + channel[None, :]
            is_bound = is_complete[:, None] & is_channel[None, :]
            maxima = tl.load(maxima_ptr, mask=is_bound, other=0.0)
            minima = tl.load(maxima_ptr + heads.head_dim, mask=is_bound, other=0.0)
            upper = tl.dot(maxima, positive, input_precision="ieee")
            upper = tl.dot(minima, negative, upper, input_precision="ieee")
            # One head after another: all at once would go through shared memory, which the loads need.
            for own in tl.static_range(heads.group):
                of_head = tl.sum(tl.where(member[None, :] == own, upper, 0.0), axis=1)
                tl.store(own_upper_ptr + own * buffers.width + place, of_head, mask=is_complete)
        part = tl.minimum(end, after)


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def _select_kernel(
    parameters: QuestRows,
    rows: Rows,
    buffers: PageBuffers,
    upper_ptr: tl.tensor,
    selected: Selected,
    counts: Counts,
    layer: tl.tensor,
    bounds_bytes: tl.tensor,
    scale: tl.tensor,
    group: tl.constexpr,
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
    scores_ptr = buffers.scores + row_and_head * buffers.width
    _write_promise(
        upper_ptr + row_and_head * group * buffers.width, buffers.width, scores_ptr, scored, scale, group, pages
    )
    sinks = tl.load(parameters.sinks + row)
    is_ordered = tl.load(parameters.by_score + row) != 0
    select_pages(rows, row, buffers, selected, row_and_head, length, kept, 1, sinks, is_ordered, 1, pages)


@triton.jit  # type: ignore[untyped-decorator]
def _write_promise(
    upper_ptr: tl.tensor,
    width: tl.tensor,
    scores_ptr: tl.tensor,
    scored: tl.tensor,
    scale: tl.tensor,
    group: tl.constexpr,
    pages: tl.constexpr,
) -> None:
    """Write what the first ``scored`` pages promise: each query head's softmax over them, summed over the group."""
    page = tl.arange(0, pages)
    is_scored = page < scored
    promise = tl.zeros([pages], tl.float32)
    for member in range(group):
        upper = tl.load(upper_ptr + member * width + page, mask=is_scored, other=_LOWEST) * scale
        weights = tl.exp2(upper - tl.max(upper, axis=0))
        promise += weights / tl.sum(weights, axis=0)
    tl.store(scores_ptr + page, promise, mask=is_scored)
    # What was stored is read by other threads.
    tl.debug_barrier()
