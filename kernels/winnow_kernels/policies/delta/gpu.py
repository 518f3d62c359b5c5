"""DELTA on a GPU (``reference``): page scores out of the Δ-layer's own attention pass.

A Δ-layer reads keys and values once. The pass that attends also leaves the scaled scores of all query heads, which take
their weights only when the log-sum-exps are known: 4 bytes for each token and query head, written and read again, that
is 6 % of the bytes of keys and values for a group of 4 and bf16 keys of 128. (Heads cannot be combined before: their
log-sum-exps differ. Half precision would save half of that, and rank pages otherwise than the reference does.)

What a step launches:

- ``write_counts`` once: which layers attend to what;
- at a layer that is a Δ-layer of some row ``attend_and_score`` (two launches), ``score_tokens`` and ``select`` (two).

At all other layers there is nothing to launch: slots stay where they are until the row's next Δ-layer. Where ranks
share out the heads, token scores are to be replaced by their maximum over the ranks before ``select``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.attend.early_termination import TILE
from winnow_kernels.attend.gpu import LARGEST_GROUP, AttendBuffers, Launch
from winnow_kernels.attend.gpu_merge import INFINITY, LN_2, PARTIAL_SLOTS, Partial, splits_of, tiles_of_split
from winnow_kernels.attend.gpu_softmax import grown_by_sinks, sinks_log2, soft_capped
from winnow_kernels.attend.gpu_widening import computable, reference_of
from winnow_kernels.batch import ELSEWHERE, WHOLE, WHOLE_TO_THE_END, Count, DecodeBatch
from winnow_kernels.cache import LayerCache
from winnow_kernels.kernel_arguments import Counts, Heads, KeysAndValues, Rows, Selected, Vectors
from winnow_kernels.policies.delta.parameters import Role
from winnow_kernels.selection.gpu_pages import PageBuffers, page_counts, select_pages, warps_of
from winnow_kernels.selection.gpu_partition import own_share, owner_of, programs_on

_TILE = tl.constexpr(TILE)
_HEADS = tl.constexpr(LARGEST_GROUP)
_PARTIAL_SLOTS = tl.constexpr(PARTIAL_SLOTS)
_WHOLE = tl.constexpr(WHOLE)
_TO_THE_END = tl.constexpr(WHOLE_TO_THE_END)
_FULL = tl.constexpr(int(Role.FULL))
_REFRESH = tl.constexpr(int(Role.REFRESH))
_ELSEWHERE = tl.constexpr(ELSEWHERE)
_CONTEXT = tl.constexpr(int(Count.CONTEXT))
_ATTENDED = tl.constexpr(int(Count.ATTENDED))
_CONTEXT_BYTES = tl.constexpr(int(Count.CONTEXT_BYTES))
_READ_BYTES = tl.constexpr(int(Count.READ_BYTES))
_LOG2_E: Final = 1.4426950408889634
_TOKENS_AT_ONCE: Final = 128
_TOKENS_SUMMED: Final = 1024
# On each multiprocessor.
SCORING_PROGRAMS: Final = 4


class DeltaRows(NamedTuple):
    """The parameters of a batch's rows.

    Attributes:
        roles: int8 [layers, rows]; 0 for a row of another kind, else what the layer is to the row (``Role``).
        budgets: int32 [rows]; pages for all KV heads; 0 for a row that is left untouched, whatever its roles.
        recent: int32 [rows]; newest pages that are always kept, at least 1.
        sinks: int32 [rows]; first tokens, whose pages are always kept, too; the budget holds both.
        by_score: int32 [rows]; not 0 where pages must come by descending score, as early termination needs them.
    """

    roles: Tensor
    budgets: Tensor
    recent: Tensor
    sinks: Tensor
    by_score: Tensor

    def at(self, layer: int) -> DeltaRows:
        """Return those in one layer, with roles [rows]."""
        return self._replace(roles=self.roles[layer])


class TokenBuffers(NamedTuple):
    """Scratch of a Δ-layer for scores of tokens.

    Attributes:
        scores: float32 [rows, query heads, tokens]; scaled scores, capped if they are, to base 2.
        greatest: float32 [rows, tokens]; the greatest weight that a query head gives a token, of rows that refresh
            (others hold any number).
        width: tokens of a row.
    """

    scores: Tensor
    greatest: Tensor
    width: int


@dataclass(frozen=True, eq=False)
class DeltaBuffers:
    """Scratch of a Δ-layer, the same in all layers: 4 × rows × tokens × (query heads + 1) bytes and little more.

    Attributes:
        tokens: scores of tokens.
        pages: scores of pages, and lists of them; one head.
    """

    tokens: TokenBuffers
    pages: PageBuffers

    @classmethod
    def empty(cls, batch: DecodeBatch, query_heads: int) -> DeltaBuffers:
        """Return buffers for all rows of ``batch``.

        Raises:
            ValueError: contexts have more pages than ``MAX_PAGES``.
        """
        device = batch.lengths.device
        scores = torch.zeros(batch.rows, query_heads, batch.longest, dtype=torch.float32, device=device)
        greatest = torch.zeros(batch.rows, batch.longest, dtype=torch.float32, device=device)
        return cls(
            TokenBuffers(scores, greatest, batch.longest),
            PageBuffers.empty(batch.rows, 1, batch.page_table.shape[1], device),
        )


def programs_of_multiprocessor(launch: Launch) -> int:
    """Return how many programs that attend fit a multiprocessor: what is stored beside takes registers."""
    return min(launch.programs, 2)


def tiles_loaded_ahead(launch: Launch) -> int:
    """Return how many tiles are loaded while one is attended to: two where there are fewer programs for it."""
    return max(2, launch.tiles_ahead) if launch.programs > programs_of_multiprocessor(launch) else launch.tiles_ahead


def write_counts(batch: DecodeBatch, rows: DeltaRows, counts: Tensor, width: int) -> None:
    """Write what the kind's rows attend to in every layer of a step.

    That is ``WHOLE_TO_THE_END`` at full layers, ``ELSEWHERE`` at Δ-layers, for their attention comes from
    ``attend_and_score``, and else the number of tokens selected, or ``WHOLE`` where these have no room.

    Args:
        batch: the batch.
        rows: parameters of its rows.
        counts: int32 [layers, rows, KV heads], contiguous; the counts of each layer's selection.
        width: of the selections' slots.
    """
    layers, _, kv_heads = counts.shape
    assert counts.is_contiguous()
    _count_kernel[(layers, batch.rows)](rows, Rows.of(batch), counts, kv_heads, width, num_warps=1)


def attend_and_score(
    layer: int,
    queries: Tensor,
    cache: LayerCache,
    batch: DecodeBatch,
    rows: DeltaRows,
    scale: float,
    attend_buffers: AttendBuffers,
    buffers: DeltaBuffers,
    output: Tensor,
) -> None:
    """Attend, with the rows that refresh in ``layer``, to their whole contexts, and leave their scores behind.

    Outputs, log-sum-exps and counts, the context's too, are what ``attend`` yields for ``WHOLE``. Other rows are left
    untouched.

    Args:
        layer: the layer's number.
        queries: [rows, query heads, head dim], in the cache's dtype, or any that kernels multiply if that is narrow;
            rows and heads may be strided.
        cache: the layer's KV cache; slots and heads strided alike in keys and values; and its softmax's cap and sink
            logits, of which the latter change outputs alone.
        batch: the batch.
        rows: parameters of its rows.
        scale: what scores are multiplied by before the softmax.
        attend_buffers: those of ``attend``.
        buffers: gets the scores.
        output: [rows, query heads, head dim]; rows and heads may be strided.
    """
    query_heads = queries.shape[1]
    pairs = batch.rows * cache.kv_heads
    launch = attend_buffers.launch
    programs = min(pairs * PARTIAL_SLOTS, programs_of_multiprocessor(launch) * attend_buffers.multiprocessors)
    of_rows = (rows.at(layer), Rows.of(batch))
    heads = Heads.of(query_heads, cache)
    _attend_kernel[(programs,)](
        Vectors.of(queries),
        KeysAndValues.of(cache),
        *of_rows,
        attend_buffers.partial,
        buffers.tokens,
        heads,
        scale * _LOG2_E,
        cache.softmax.cap_log2,
        pairs,
        pair_block=triton.next_power_of_2(pairs),
        tiles_ahead=tiles_loaded_ahead(launch),
        num_warps=launch.warps,
    )
    _merge_kernel[(pairs, query_heads // cache.kv_heads)](
        *of_rows,
        attend_buffers.partial,
        Vectors.of(output),
        attend_buffers.log_sum_exp,
        cache.softmax.sink_logits,
        Counts.of(batch),
        heads,
        2 * cache.vector_bytes,
        num_warps=4,
    )


def score_tokens(
    layer: int, batch: DecodeBatch, rows: DeltaRows, attend_buffers: AttendBuffers, buffers: DeltaBuffers
) -> None:
    """Find the greatest weight that a query head gives each token, in the rows that refresh in ``layer``.

    Rows and tokens beyond those hold any number afterwards; to combine ranks is to take the maximum of everything.
    """
    query_heads = buffers.tokens.scores.shape[1]
    _token_kernel[(programs_on(batch.lengths.device, SCORING_PROGRAMS),)](
        rows.at(layer),
        Rows.of(batch),
        buffers.tokens,
        attend_buffers.log_sum_exp,
        batch.rows,
        query_heads=query_heads,
        head_block=triton.next_power_of_2(query_heads),
        block=_TOKENS_AT_ONCE,
        row_block=triton.next_power_of_2(batch.rows),
        num_warps=4,
    )


def select(layer: int, batch: DecodeBatch, rows: DeltaRows, slots: Tensor, buffers: DeltaBuffers) -> None:
    """Select pages by the token scores and write the slots of the rows that refresh in ``layer``, for all KV heads.

    Args:
        layer: the layer's number.
        batch: the batch.
        rows: parameters of its rows.
        slots: int32 [rows, KV heads, width], contiguous; kept until the rows' next Δ-layer.
        buffers: with the token scores.
    """
    kv_heads, width = slots.shape[1:]
    assert slots.is_contiguous()
    pages = batch.page_table.shape[1]
    of_rows = (rows.at(layer), Rows.of(batch), buffers.pages)
    _page_kernel[(programs_on(slots.device, SCORING_PROGRAMS),)](
        *of_rows,
        buffers.tokens,
        batch.rows,
        block=max(1, _TOKENS_SUMMED // batch.page_size),
        row_block=triton.next_power_of_2(batch.rows),
        num_warps=4,
    )
    _select_kernel[(batch.rows,)](
        *of_rows,
        # Counts are written at the step's begin.
        Selected(slots, None, width),
        kv_heads,
        pages=triton.next_power_of_2(pages),
        num_warps=warps_of(pages),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _count_kernel(
    parameters: DeltaRows, rows: Rows, counts_ptr: tl.tensor, kv_heads: tl.tensor, width: tl.tensor
) -> None:
    row = tl.program_id(1)
    row_in_layer = tl.program_id(0) * tl.num_programs(1) + row
    role = tl.load(parameters.roles + row_in_layer)
    budget = tl.load(parameters.budgets + row)
    if (role == 0) | (budget == 0):
        return
    _, tokens = page_counts(tl.load(rows.lengths + row), budget, rows.page_size)
    count = tl.where(tokens > width, _WHOLE, tokens)
    count = tl.where(role == _FULL, _TO_THE_END, count)
    count = tl.where(role == _REFRESH, _ELSEWHERE, count)
    for head in range(kv_heads):
        tl.store(counts_ptr + row_in_layer * kv_heads + head, count)


@triton.jit  # type: ignore[untyped-decorator]
def _refreshes(parameters: DeltaRows, row: tl.tensor) -> tl.tensor:
    return (tl.load(parameters.roles + row) == _REFRESH) & (tl.load(parameters.budgets + row) > 0)


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def _attend_kernel(
    queries: Vectors,
    cache: KeysAndValues,
    parameters: DeltaRows,
    rows: Rows,
    partial: Partial,
    scratch: TokenBuffers,
    heads: Heads,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    pairs: tl.tensor,
    pair_block: tl.constexpr,
    tiles_ahead: tl.constexpr,
) -> None:
    """Attend to splits of whole contexts; a pair is a row and a KV head, as in ``attend.gpu``."""
    all_pairs = tl.arange(0, pair_block)
    all_rows = all_pairs // heads.kv_heads
    in_batch = all_pairs < pairs
    refreshes = tl.load(parameters.roles + all_rows, mask=in_batch, other=0) == _REFRESH
    refreshes &= tl.load(parameters.budgets + all_rows, mask=in_batch, other=0) > 0
    all_tokens = tl.load(rows.lengths + all_rows, mask=refreshes, other=0)
    all_splits = splits_of(all_tokens, all_tokens < 0)
    up_to = tl.cumsum(all_splits, axis=0)
    member = tl.arange(0, _HEADS)
    is_member = member < heads.group
    channel = tl.arange(0, heads.dim_block)
    is_channel = channel < heads.head_dim
    for item in range(tl.program_id(0), tl.sum(all_splits, axis=0), tl.num_programs(0)):
        pair = tl.sum((up_to <= item).to(tl.int32), axis=0)
        split = item - tl.sum(tl.where(up_to <= item, all_splits, 0), axis=0)
        row = (pair // heads.kv_heads).to(tl.int64)
        kv_head = pair % heads.kv_heads
        tokens = tl.load(rows.lengths + row)
        first, _every, tiles = tiles_of_split(split, tokens, tokens < 0)
        query_heads = kv_head * heads.group + member
        query = tl.load(
            queries.pointer + row * queries.row_stride + query_heads[:, None] * queries.head_stride + channel[None, :],
            mask=is_member[:, None] & is_channel[None, :],
            other=0.0,
        )
        query = computable(query, cache.keys_ptr.dtype.element_ty)
        own_table_ptr = rows.page_table + row * rows.table_stride
        own_scores_ptr = scratch.scores + pair.to(tl.int64) * heads.group * scratch.width
        highest = tl.full([_HEADS], -INFINITY, tl.float32)
        mass = tl.zeros([_HEADS], tl.float32)
        weighted = tl.zeros([_HEADS, heads.dim_block], tl.float32)
        # A tile's pages are loaded before its keys: two stages each.
        for tile in tl.range(first, first + tiles, num_stages=2 * tiles_ahead + 1):
            token = tile * _TILE + tl.arange(0, _TILE)
            is_token = token < tokens
            page = tl.load(own_table_ptr + (token >> rows.page_bits), mask=is_token, other=0)
            slot = (page << rows.page_bits) + (token & (rows.page_size - 1))
            vector = (slot.to(tl.int64) * cache.slot_stride + kv_head * cache.head_stride)[:, None] + channel[None, :]
            is_element = is_token[:, None] & is_channel[None, :]
            key = tl.load(cache.keys_ptr + vector, mask=is_element, other=0.0).to(query.dtype)
            value = tl.load(cache.values_ptr + vector, mask=is_element, other=0.0).to(query.dtype)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
            if cap_log2 is not None:
                scores = soft_capped(scores, cap_log2)
            scores = tl.where(is_token[None, :], scores, -INFINITY)
            tl.store(
                own_scores_ptr + member[:, None] * scratch.width + token[None, :],
                scores,
                mask=is_member[:, None] & is_token[None, :],
            )
            new_highest = tl.maximum(highest, reference_of(tl.max(scores, axis=1), value.dtype))
            fade = tl.exp2(highest - new_highest)
            weights = tl.exp2(scores - new_highest[:, None])
            mass = mass * fade + tl.sum(weights, axis=1)
            weighted = tl.dot(weights.to(value.dtype), value, weighted * fade[:, None], input_precision="ieee")
            highest = new_highest
        head = pair.to(tl.int64) * heads.group + member
        tl.store(partial.masses + head * _PARTIAL_SLOTS + split, highest + tl.log2(mass), mask=is_member)
        tl.store(
            partial.outputs + (head * _PARTIAL_SLOTS + split)[:, None] * heads.head_dim + channel[None, :],
            weighted / mass[:, None],
            mask=is_member[:, None] & is_channel[None, :],
        )


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(
    parameters: DeltaRows,
    rows: Rows,
    partial: Partial,
    output: Vectors,
    log_sum_exp_ptr: tl.tensor,
    sink_logits_ptr: tl.tensor | None,
    counts: Counts,
    heads: Heads,
    token_bytes: tl.tensor,
) -> None:
    pair = tl.program_id(0)
    row = (pair // heads.kv_heads).to(tl.int64)
    if not _refreshes(parameters, row):
        return
    tokens = tl.load(rows.lengths + row)
    split = tl.arange(0, _PARTIAL_SLOTS)
    is_split = split < splits_of(tokens, tokens < 0)
    head = pair.to(tl.int64) * heads.group + tl.program_id(1)
    masses = tl.load(partial.masses + head * _PARTIAL_SLOTS + split, mask=is_split, other=-INFINITY)
    channel = tl.arange(0, heads.dim_block)
    is_channel = channel < heads.head_dim
    outputs = tl.load(
        partial.outputs + (head * _PARTIAL_SLOTS + split[:, None]) * heads.head_dim + channel[None, :],
        mask=is_split[:, None] & is_channel[None, :],
        other=0.0,
    )
    highest = tl.max(masses, axis=0)
    weights = tl.exp2(masses - highest)
    mass = tl.sum(weights, axis=0)
    merged = tl.sum(outputs * weights[:, None], axis=0) / mass
    of_row = (pair % heads.kv_heads) * heads.group + tl.program_id(1)
    if sink_logits_ptr is not None:
        merged = merged / grown_by_sinks(sinks_log2(sink_logits_ptr, of_row, True), highest + tl.log2(mass))
    own_output_ptr = output.pointer + row * output.row_stride + of_row * output.head_stride
    tl.store(own_output_ptr + channel, merged.to(output.pointer.dtype.element_ty), mask=is_channel)
    tl.store(log_sum_exp_ptr + head, (highest + tl.log2(mass)) * LN_2)
    if tl.program_id(1) == 0:
        amount = tokens.to(tl.int64)
        own_counts_ptr = counts.pointer + row * counts.row_stride
        tl.atomic_add(own_counts_ptr + _CONTEXT, amount, sem="relaxed")
        tl.atomic_add(own_counts_ptr + _ATTENDED, amount, sem="relaxed")
        tl.atomic_add(own_counts_ptr + _CONTEXT_BYTES, amount * token_bytes, sem="relaxed")
        tl.atomic_add(own_counts_ptr + _READ_BYTES, amount * token_bytes, sem="relaxed")


@triton.jit(do_not_specialize=["batch_rows"])  # type: ignore[untyped-decorator]
def _token_kernel(
    parameters: DeltaRows,
    rows: Rows,
    scratch: TokenBuffers,
    log_sum_exp_ptr: tl.tensor,
    batch_rows: tl.tensor,
    query_heads: tl.constexpr,
    head_block: tl.constexpr,
    block: tl.constexpr,
    row_block: tl.constexpr,
) -> None:
    blocks = _parts(parameters, rows, batch_rows, block, row_block)
    head = tl.arange(0, head_block)
    is_head = head < query_heads
    part, end = own_share(blocks)
    while part < end:
        owner, first, after = owner_of(part, blocks)
        row = owner.to(tl.int64)
        mass = tl.load(log_sum_exp_ptr + row * query_heads + head, mask=is_head, other=0.0) / LN_2
        # Bounds that are multiples of 16 let loads be wide; what is beyond the context means nothing to anybody.
        tokens = tl.cdiv(tl.load(rows.lengths + row), 16) * 16
        own_scores_ptr = scratch.scores + row * query_heads * scratch.width
        for number in range(part - first, tl.minimum(end, after) - first):
            token = number * block + tl.arange(0, block)
            is_token = token < tokens
            scores = tl.load(
                own_scores_ptr + head[:, None] * scratch.width + token[None, :],
                mask=is_head[:, None] & is_token[None, :],
                other=-INFINITY,
            )
            # The greatest weight is that of the greatest exponent.
            greatest = tl.exp2(tl.max(scores - mass[:, None], axis=0))
            tl.store(scratch.greatest + row * scratch.width + token, greatest, mask=is_token)
        part = tl.minimum(end, after)


@triton.jit(do_not_specialize=["batch_rows"])  # type: ignore[untyped-decorator]
def _page_kernel(
    parameters: DeltaRows,
    rows: Rows,
    pages: PageBuffers,
    scratch: TokenBuffers,
    batch_rows: tl.tensor,
    block: tl.constexpr,
    row_block: tl.constexpr,
) -> None:
    blocks = _parts(parameters, rows, batch_rows, block * rows.page_size, row_block)
    begin, end = own_share(blocks)
    for part in range(begin, end):
        owner, first, _after = owner_of(part, blocks)
        row = owner.to(tl.int64)
        length = tl.load(rows.lengths + row)
        page = (part - first) * block + tl.arange(0, block)
        token = page[:, None] * rows.page_size + tl.arange(0, rows.page_size)[None, :]
        scores = tl.load(scratch.greatest + row * scratch.width + token, mask=token < length, other=0.0)
        tl.store(
            pages.scores + row * pages.width + page,
            tl.sum(scores, axis=1),
            mask=page * rows.page_size < length,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _parts(
    parameters: DeltaRows, rows: Rows, batch_rows: tl.tensor, tokens: tl.constexpr, row_block: tl.constexpr
) -> tl.tensor:
    """Return how many parts of ``tokens`` tokens the rows have that refresh."""
    row = tl.arange(0, row_block)
    in_batch = row < batch_rows
    refreshes = tl.load(parameters.roles + row, mask=in_batch, other=0) == _REFRESH
    refreshes &= tl.load(parameters.budgets + row, mask=in_batch, other=0) > 0
    return tl.cdiv(tl.load(rows.lengths + row, mask=refreshes, other=0), tokens)


@triton.jit  # type: ignore[untyped-decorator]
def _select_kernel(
    parameters: DeltaRows,
    rows: Rows,
    buffers: PageBuffers,
    selected: Selected,
    kv_heads: tl.tensor,
    pages: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if not _refreshes(parameters, row):
        return
    length = tl.load(rows.lengths + row)
    kept, tokens = page_counts(length, tl.load(parameters.budgets + row), rows.page_size)
    if tokens > selected.width:
        return
    recent, sinks = tl.load(parameters.recent + row), tl.load(parameters.sinks + row)
    is_ordered = tl.load(parameters.by_score + row) != 0
    select_pages(rows, row, buffers, selected, row, length, kept, recent, sinks, is_ordered, kv_heads, pages)
