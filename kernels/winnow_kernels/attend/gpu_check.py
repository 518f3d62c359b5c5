"""Dense attention from several new tokens of each row: the pass in which drafts are checked.

A layer with a sliding window is read from the first token on that the row's first query sees. Of a row that has drafted
less than others, or nothing, only the tokens that are its own attend, in a smaller block where they fit one.

All new tokens of a row share one read of its context, on tensor cores: the query heads of a KV head's group, times the
new tokens, are the rows of a tile. What must be read is as much as for one dense decode step of the row. A context is
read in splits of 4 to 64 tiles of 64 tokens, and what these yield is merged. Two launches. How many splits there are
follows from the context's length, and from how many rows there are: as many as programs run at once, or twice as many,
since a device that is filled one and a half times waits as long as one that is filled twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.attend.early_termination import TILE
from winnow_kernels.attend.gpu_softmax import grown_by_sinks, sinks_log2, soft_capped
from winnow_kernels.attend.gpu_widening import computable, reference_of
from winnow_kernels.batch import NO_MASS, DecodeBatch
from winnow_kernels.cache import LayerCache
from winnow_kernels.kernel_arguments import Heads, KeysAndValues, Number, Pointer, Rows, Vectors
from winnow_kernels.selection.gpu_partition import programs_on

SPLITS: Final = 64
"""Of a context, at most; a power of two."""
BLOCK_BYTES: Final = 32 << 10
"""Of the queries that share a read of keys and values, at most: what fits the registers of a program."""

_SPLITS = tl.constexpr(SPLITS)
_TILE = tl.constexpr(TILE)
_QUARTERS = tl.constexpr(4)
_LANES = tl.constexpr(4)
_SMALLEST_BLOCK: Final = tl.constexpr(16)
_SMALL_BLOCK: Final = 32
_FEWEST_TILES = tl.constexpr(4)
_MAX_TILES = tl.constexpr(64)
_MAX_ROUNDS: Final = 2
_SHARED_BYTES: Final = 227 << 10
_OTHER_BYTES: Final = 8 << 10
_FEW_REGISTERS: Final = 128
_PROGRAMS_OF_FEW_REGISTERS: Final = 4
_NO_MASS = tl.constexpr(NO_MASS)
_NO_WINDOW: Final = tl.constexpr(-1)
_LOG2_E: Final = 1.4426950408889634


class CheckPartial(NamedTuple):
    """What splits yield.

    Attributes:
        outputs: float32 [tokens, query heads, ``SPLITS``, head dim].
        masses: float32 [tokens, query heads, ``SPLITS``]; log-sum-exp to base 2, ``NO_MASS`` of what sees nothing.
        totals: float32 [tokens, query heads]; the same of all splits, without sinks.
    """

    outputs: Pointer
    masses: Pointer
    totals: Pointer

    @classmethod
    def empty(cls, tokens: int, query_heads: int, cache: LayerCache) -> CheckPartial:
        """Return room for ``tokens`` new tokens: 256 × tokens × query heads × (head dim + 1) bytes."""
        device = cache.keys.device
        return cls(
            torch.empty(tokens, query_heads, SPLITS, cache.head_dim, dtype=torch.float32, device=device),
            torch.empty(tokens, query_heads, SPLITS, dtype=torch.float32, device=device),
            torch.empty(tokens, query_heads, dtype=torch.float32, device=device),
        )


class PageSums(NamedTuple):
    """How much attention each page gets from each query, of rows that ask for it; of other rows they mean nothing.

    The queries are the new tokens of a row times the query heads of a KV head's group, a token's heads together.

    Attributes:
        sums: float32 [rows, KV heads, ``width``, queries]; 2 to the power of each of a page's scores, to base 2, less
            ``highest`` of its tile, added up.
        highest: float32 [rows, KV heads, tiles of ``width`` pages, queries]; the highest score up to the tile, or more.
        asking: int32 [rows]; not 0 of those that ask.
        width: pages of a row and KV head.
    """

    sums: Pointer
    highest: Pointer
    asking: Pointer
    width: Number


@dataclass(frozen=True)
class CheckLaunch:
    """How the kernel runs.

    Attributes:
        block: queries of a program.
        blocks: of the queries of a row and KV head.
        splits: of a context of a few thousand tokens or more.
        warps: of a program.
        stages: of its loop over tiles.
        registers: of a thread, at most; as many as the compiler likes if None.
    """

    block: int
    blocks: int
    splits: int
    warps: int = 4
    stages: int = 2
    registers: int | None = None

    @classmethod
    def of(cls, rows: int, queries: int, cache: LayerCache, element_size: int) -> CheckLaunch:
        """Return what suits ``rows`` of ``queries`` each for a KV head, on the cache's device.

        ``element_size`` is that of queries, as which keys and values are multiplied.
        """
        vector_bytes = triton.next_power_of_2(cache.head_dim) * element_size
        block = max(_SMALLEST_BLOCK.value, min(BLOCK_BYTES // vector_bytes, triton.next_power_of_2(queries)))
        blocks = triton.cdiv(queries, block)
        stages = 2 if vector_bytes <= 512 else 1
        registers = None
        if block <= _SMALL_BLOCK and vector_bytes <= 256:
            # While one waits for its tile, and for its warps, the others compute.
            registers, of_multiprocessor = _FEW_REGISTERS, _PROGRAMS_OF_FEW_REGISTERS
        else:
            tiles_bytes = stages * 2 * TILE * vector_bytes
            of_multiprocessor = max(1, _SHARED_BYTES // (tiles_bytes + _OTHER_BYTES))
        at_once = programs_on(cache.keys.device, of_multiprocessor)
        programs = rows * cache.kv_heads * blocks
        rounds = [at_once * rounds // programs for rounds in range(1, _MAX_ROUNDS + 1)]
        fitting = [splits for splits in rounds if 1 <= splits <= SPLITS]
        splits = fitting[-1] if fitting else min(SPLITS, max(1, rounds[0]))
        return cls(block, blocks, splits, stages=stages, registers=registers)


def attend_new(
    queries: Tensor,
    cache: LayerCache,
    batch: DecodeBatch,
    scale: float,
    partial: CheckPartial,
    output: Tensor,
    launch: CheckLaunch | None = None,
    page_sums: PageSums | None = None,
    window: int | None = None,
    own_tokens: Tensor | None = None,
) -> None:
    """Attend from each row's newest tokens, whose keys and values are in the cache, causally to its whole context.

    Args:
        queries: [rows × new tokens, query heads, head dim], in the cache's dtype, or any that kernels multiply if that
            is narrow, a row's tokens in order; strided by token and head. A token before a context's first one sees
            nothing, and gets zeros: a row of padding.
        cache: the layer's KV cache, and its softmax's cap and sink logits.
        batch: where the rows' contexts lie, the new tokens among them, in pages of at most 64 tokens.
        scale: what scores are multiplied by before the softmax.
        partial: for at least as many tokens.
        output: of the queries' shape; strided by token and head.
        launch: how the kernel runs.
        page_sums: for at least as many tokens; gets what pages get, where it is wanted. Not beside a window.
        window: how many tokens before its own position a token sees; None for all.
        own_tokens: int32 [rows], at least 1; how many of a row's new tokens, the first ones, are to attend; None for
            all. The others get zeros.
    """
    tokens, query_heads, _ = queries.shape
    new_tokens, rest = divmod(tokens, batch.rows)
    assert rest == 0
    assert tokens <= len(partial.masses)
    assert batch.page_size <= TILE
    assert page_sums is None or window is None
    own_window = _NO_WINDOW.value if window is None else window
    heads = Heads.of(query_heads, cache)
    of_pair = new_tokens * (query_heads // cache.kv_heads)
    launch = launch or CheckLaunch.of(batch.rows, of_pair, cache, queries.element_size())
    reach = batch.longest if window is None else min(batch.longest, window + new_tokens + TILE)
    splits = min(SPLITS, triton.cdiv(triton.cdiv(reach, TILE), _FEWEST_TILES.value))
    _attend_kernel[(splits, cache.kv_heads * launch.blocks, batch.rows)](
        Vectors.of(queries),
        KeysAndValues.of(cache),
        Rows.of(batch),
        partial,
        heads,
        scale * _LOG2_E,
        cache.softmax.cap_log2,
        # Where nobody asks nothing is looked at.
        page_sums or PageSums(partial.masses, partial.masses, batch.lengths, 0),
        own_tokens,
        leaves_sums=page_sums is not None,
        new_tokens=new_tokens,
        block=launch.block,
        window=own_window,
        aimed_splits=launch.splits,
        stages=launch.stages,
        num_warps=launch.warps,
        maxnreg=launch.registers,
    )
    _merge_kernel[(tokens, query_heads)](
        partial,
        Rows.of(batch),
        Vectors.of(output),
        cache.softmax.sink_logits,
        heads,
        own_tokens,
        new_tokens=new_tokens,
        window=own_window,
        aimed_splits=launch.splits,
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _tiles_of_split(tiles: tl.tensor, aimed_splits: tl.constexpr) -> tl.tensor:
    """Return how many tiles each split of a context of ``tiles`` has; the last may have fewer."""
    aimed = tl.minimum(tl.maximum(tl.cdiv(tiles, aimed_splits), _FEWEST_TILES), _MAX_TILES)
    return tl.maximum(aimed, tl.cdiv(tiles, _SPLITS))


@triton.jit  # type: ignore[untyped-decorator]
def _first_tile(length: tl.tensor, new_tokens: tl.constexpr, window: tl.constexpr) -> tl.tensor:
    """Return the first tile that a row's queries see anything of."""
    first = tl.zeros_like(length)
    if window != _NO_WINDOW:
        first = tl.maximum(length - new_tokens - window, 0) // _TILE
    return first


@triton.jit  # type: ignore[untyped-decorator]
def _own_tokens(own_tokens_ptr: tl.tensor | None, row: tl.tensor, new_tokens: tl.constexpr) -> tl.tensor:
    """Return how many of a row's new tokens attend."""
    own = new_tokens
    if own_tokens_ptr is not None:
        own = tl.load(own_tokens_ptr + row)
    return own


@triton.jit  # type: ignore[untyped-decorator]
def _attend_kernel(
    queries: Vectors,
    cache: KeysAndValues,
    rows: Rows,
    partial: CheckPartial,
    heads: Heads,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    page_sums: PageSums,
    own_tokens_ptr: tl.tensor | None,
    leaves_sums: tl.constexpr,
    new_tokens: tl.constexpr,
    window: tl.constexpr,
    block: tl.constexpr,
    aimed_splits: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Grid: splits × (KV heads × blocks of queries) × rows."""
    first_query = tl.program_id(1) // heads.kv_heads * block
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(rows.lengths + row)
    tiles = tl.cdiv(length, _TILE)
    first = _first_tile(length, new_tokens, window)
    of_split = _tiles_of_split(tiles - first, aimed_splits)
    begin = first + tl.program_id(0) * of_split
    own_queries = _own_tokens(own_tokens_ptr, row, new_tokens) * heads.group
    if (begin >= tiles) | (first_query >= own_queries):
        return
    end = tl.minimum(begin + of_split, tiles)
    # Constants stay apart: in a tuple they would become values.
    part = (scale_log2, cap_log2, own_queries, begin, end)
    # The one is decided when the kernel is compiled.
    if own_tokens_ptr is not None and block > _SMALLEST_BLOCK:  # noqa: SIM102
        if own_queries <= _SMALLEST_BLOCK:
            _attend_split(
                queries,
                cache,
                rows,
                partial,
                page_sums,
                heads,
                *part,
                leaves_sums,
                new_tokens,
                window,
                stages,
                _SMALLEST_BLOCK,
            )
            return
    _attend_split(
        queries, cache, rows, partial, page_sums, heads, *part, leaves_sums, new_tokens, window, stages, block
    )


@triton.jit  # type: ignore[untyped-decorator]
def _attend_split(  # noqa: PLR0915  # A kernel's state cannot be handed around in parts.
    queries: Vectors,
    cache: KeysAndValues,
    rows: Rows,
    partial: CheckPartial,
    page_sums: PageSums,
    heads: Heads,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    own_queries: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    leaves_sums: tl.constexpr,
    new_tokens: tl.constexpr,
    window: tl.constexpr,
    stages: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Attend from a program's block of the ``own_queries`` of a row and KV head to its tiles, ``begin`` to ``end``."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1) % heads.kv_heads
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(rows.lengths + row)
    member = tl.program_id(1) // heads.kv_heads * block + tl.arange(0, block)
    new_token = member // heads.group
    head = kv_head * heads.group + member % heads.group
    is_query = member < own_queries
    dim = tl.arange(0, heads.dim_block)
    is_dim = dim < heads.head_dim
    # What a row has fits 32 bits, and half as many registers.
    of_token = new_token * queries.row_stride + head * queries.head_stride
    query = tl.load(
        queries.pointer + row * new_tokens * queries.row_stride + of_token[:, None] + dim[None, :],
        mask=is_query[:, None] & is_dim[None, :],
        other=0.0,
    )
    query = computable(query, cache.keys_ptr.dtype.element_ty)
    position = tl.where(is_query, length - new_tokens + new_token, -1)
    table_ptr = rows.page_table + row * rows.table_stride
    in_tile = _tokens_of_tile()
    if leaves_sums:
        asks = tl.load(page_sums.asking + row) != 0
    highest = tl.full([block], _NO_MASS, tl.float32)
    mass = tl.zeros([block, _QUARTERS, _LANES], tl.float32)
    weighted = tl.zeros([block, heads.dim_block], tl.float32)
    for tile in tl.range(begin, end, num_stages=stages):
        seen = tile * _TILE + in_tile
        page = tl.load(table_ptr + seen // rows.page_size, mask=seen < length, other=0)
        # Tiles consist of whole pages, so what is added is the same in all.
        slot = page * rows.page_size + in_tile % rows.page_size
        offset = slot.to(tl.int64) * cache.slot_stride + kv_head * cache.head_stride
        is_vector = (seen < length)[:, None] & is_dim[None, :]
        key = tl.load(cache.keys_ptr + offset[:, None] + dim[None, :], mask=is_vector, other=0.0).to(query.dtype)
        value = tl.load(cache.values_ptr + offset[:, None] + dim[None, :], mask=is_vector, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        if cap_log2 is not None:
            scores = soft_capped(scores, cap_log2)
        # Of finite numbers alone: a query that sees nothing in a tile must not turn into NaN.
        is_seen = seen[None, :] <= position[:, None]
        if window != _NO_WINDOW:
            is_seen = is_seen & (seen[None, :] >= position[:, None] - window)
        scores = tl.where(is_seen, scores, 2 * _NO_MASS)
        higher = tl.maximum(highest, reference_of(tl.max(scores, axis=1), value.dtype))
        fade = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        of_lanes = _sums_of_lanes(weights)
        mass = mass * _of_lanes(fade, weights) + of_lanes
        weighted = tl.dot(weights.to(value.dtype), value, weighted * fade[:, None], input_precision="ieee")
        highest = higher
        if leaves_sums:  # noqa: SIM102  # The one is decided when the kernel is compiled.
            if asks:
                pair = row * heads.kv_heads + kv_head
                of_quarters = tl.sum(of_lanes, axis=2)
                _leave_sums(
                    page_sums, rows, pair, member, is_query, new_tokens * heads.group, of_quarters, higher, tile, length
                )
    mass = tl.sum(tl.sum(mass, axis=2), axis=1)
    saw = mass > 0.0
    # Of padding, and of queries before all that a split has, nothing is seen: neither logarithms nor quotients of 0.
    mass = tl.where(saw, mass, 1.0)
    query_heads = heads.kv_heads * heads.group
    of_row = row * new_tokens * query_heads * _SPLITS
    place = (new_token * query_heads + head) * _SPLITS + split
    tl.store(partial.masses + of_row + place, tl.where(saw, highest + tl.log2(mass), _NO_MASS), mask=is_query)
    tl.store(
        partial.outputs + of_row * heads.head_dim + place[:, None] * heads.head_dim + dim[None, :],
        weighted / mass[:, None],
        mask=is_query[:, None] & is_dim[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator]
def _tokens_of_tile() -> tl.tensor:
    """Return the order in which a tile's tokens are taken: 8 of each quarter, and the next 8 of each.

    Tensor cores hand out scores in columns of 8, in turn to four warps. So each warp has a quarter to itself, and sums
    over it need no other's.
    """
    column = tl.arange(0, _TILE)
    quarter: tl.constexpr = _TILE // _QUARTERS
    return column // 8 % _QUARTERS * quarter + column // (8 * _QUARTERS) * 8 + column % 8


@triton.jit  # type: ignore[untyped-decorator]
def _sums_of_lanes(weights: tl.tensor) -> tl.tensor:
    """Return what of ``weights``, [queries, tokens of a tile] as they are taken, one thread has of each quarter, added.

    Tensor cores give each of ``_LANES`` threads two columns of 8.
    """
    by_lane = tl.reshape(weights, [weights.shape[0], _TILE // (8 * _QUARTERS), _QUARTERS, _LANES, 2])
    return tl.sum(tl.sum(by_lane, axis=4), axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def _of_lanes(of_queries: tl.tensor, weights: tl.tensor) -> tl.tensor:
    """Return ``of_queries``, [queries], for all that ``_sums_of_lanes`` of ``weights`` returns.

    The threads that multiply the two have both: a mere ``of_queries[:, None, None]`` would go through shared memory.
    """
    everywhere = tl.broadcast_to(of_queries[:, None], weights.shape)
    by_lane = tl.reshape(everywhere, [weights.shape[0], _TILE // (8 * _QUARTERS), _QUARTERS, _LANES, 2])
    return tl.max(tl.max(by_lane, axis=4), axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def _leave_sums(
    page_sums: PageSums,
    rows: Rows,
    pair: tl.tensor,
    member: tl.tensor,
    is_query: tl.tensor,
    queries_of_pair: tl.constexpr,
    of_quarters: tl.tensor,
    highest: tl.tensor,
    tile: tl.tensor,
    length: tl.tensor,
) -> None:
    """Store the sums of a tile's pages, from those of [queries, quarters], and ``highest``, [queries]."""
    pages: tl.constexpr = _TILE // rows.page_size
    page = tile * pages + tl.arange(0, pages)
    tl.store(
        page_sums.sums + pair * page_sums.width * queries_of_pair + page[None, :] * queries_of_pair + member[:, None],
        tl.sum(tl.reshape(of_quarters, [of_quarters.shape[0], pages, _QUARTERS // pages]), axis=2),
        mask=is_query[:, None] & (page * rows.page_size < length)[None, :],
    )
    tiles = tl.cdiv(page_sums.width, pages)
    tl.store(page_sums.highest + (pair * tiles + tile) * queries_of_pair + member, highest, mask=is_query)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(
    partial: CheckPartial,
    rows: Rows,
    output: Vectors,
    sink_logits_ptr: tl.tensor | None,
    heads: Heads,
    own_tokens_ptr: tl.tensor | None,
    new_tokens: tl.constexpr,
    window: tl.constexpr,
    aimed_splits: tl.constexpr,
) -> None:
    """Grid: tokens × query heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = token // new_tokens
    length = tl.load(rows.lengths + row)
    attends = token % new_tokens < _own_tokens(own_tokens_ptr, row, new_tokens)
    tiles = tl.cdiv(length, _TILE) - _first_tile(length, new_tokens, window)
    split = tl.arange(0, _SPLITS)
    present = attends & (split < tl.cdiv(tiles, _tiles_of_split(tiles, aimed_splits)))
    place = (token * (heads.kv_heads * heads.group) + head) * _SPLITS + split
    masses = tl.load(partial.masses + place, mask=present, other=_NO_MASS)
    dim = tl.arange(0, heads.dim_block)
    is_dim = dim < heads.head_dim
    outputs = tl.load(
        partial.outputs + place[:, None] * heads.head_dim + dim[None, :],
        mask=present[:, None] & is_dim[None, :],
        other=0.0,
    )
    highest = tl.max(masses, axis=0)
    weights = tl.exp2(masses - highest)
    total = tl.sum(weights, axis=0)
    merged = tl.sum(outputs * weights[:, None], axis=0) / total
    tl.store(partial.totals + token * (heads.kv_heads * heads.group) + head, highest + tl.log2(total))
    if sink_logits_ptr is not None:
        merged = merged / grown_by_sinks(sinks_log2(sink_logits_ptr, head, True), highest + tl.log2(total))
    target = output.pointer + token * output.row_stride + head * output.head_stride + dim
    tl.store(target, merged.to(output.pointer.dtype.element_ty), mask=is_dim)
