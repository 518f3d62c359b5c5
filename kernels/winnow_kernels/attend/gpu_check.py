"""Dense attention from several new tokens of each row: the pass in which drafts are checked.

A layer with a sliding window is read from the first token on that the row's first query sees.

All new tokens of a row share one read of its context, on tensor cores: the query heads of a KV head's group, times the
new tokens, are the rows of a tile. What must be read is as much as for one dense decode step of the row. A context is
read in splits of 4 to 64 tiles of 64 tokens, and what these yield is merged. Two launches. How many splits there are
follows from the context's length, and from how many rows there are: as many as programs run at once, or a few times as
many, since a device that is filled two and a half times waits as long as one that is filled three times.
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
_SMALL_BLOCK: Final = tl.constexpr(32)
_FEWEST_TILES = tl.constexpr(4)
_MAX_TILES = tl.constexpr(64)
_MAX_ROUNDS: Final = 3
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


class PageLogs(NamedTuple):
    """How much attention each page gets from each query, of rows that ask for it.

    Attributes:
        pointer: float32 [rows, KV heads, ``width``, queries], the queries being the new tokens of a row times the query
            heads of a KV head's group, a token's heads together; logarithms to base 2 of what exponentials of a page's
            scaled scores add up to. Of rows that do not ask, and of pages that a query sees nothing of, they mean
            nothing or are at most ``NO_MASS``, -inf too.
        asking: int32 [rows]; not 0 of those that ask.
        width: pages of a row and KV head.
    """

    pointer: Pointer
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
        block = max(16, min(BLOCK_BYTES // vector_bytes, triton.next_power_of_2(queries)))
        blocks = triton.cdiv(queries, block)
        stages = 2 if vector_bytes <= 512 else 1
        registers = None
        if block <= _SMALL_BLOCK.value and vector_bytes <= 256:
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
    page_logs: PageLogs | None = None,
    window: int | None = None,
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
        page_logs: for at least as many tokens; gets what pages get, where it is wanted. Not beside a window.
        window: how many tokens before its own position a token sees; None for all.
    """
    tokens, query_heads, _ = queries.shape
    new_tokens, rest = divmod(tokens, batch.rows)
    assert rest == 0
    assert tokens <= len(partial.masses)
    assert batch.page_size <= TILE
    assert page_logs is None or window is None
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
        page_logs or PageLogs(partial.masses, batch.lengths, 0),
        leaves_logs=page_logs is not None,
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
def _attend_kernel(  # noqa: PLR0915  # A kernel's state cannot be handed around in parts.
    queries: Vectors,
    cache: KeysAndValues,
    rows: Rows,
    partial: CheckPartial,
    heads: Heads,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    page_logs: PageLogs,
    leaves_logs: tl.constexpr,
    new_tokens: tl.constexpr,
    window: tl.constexpr,
    block: tl.constexpr,
    aimed_splits: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Grid: splits × (KV heads × blocks of queries) × rows."""
    split = tl.program_id(0)
    kv_head = tl.program_id(1) % heads.kv_heads
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(rows.lengths + row)
    tiles = tl.cdiv(length, _TILE)
    first = _first_tile(length, new_tokens, window)
    of_split = _tiles_of_split(tiles - first, aimed_splits)
    begin = first + split * of_split
    if begin >= tiles:
        return
    member = tl.program_id(1) // heads.kv_heads * block + tl.arange(0, block)
    new_token = member // heads.group
    head = kv_head * heads.group + member % heads.group
    is_query = new_token < new_tokens
    dim = tl.arange(0, heads.dim_block)
    is_dim = dim < heads.head_dim
    token = row * new_tokens + new_token
    of_token = token * queries.row_stride + head * queries.head_stride
    query = tl.load(
        queries.pointer + of_token[:, None] + dim[None, :], mask=is_query[:, None] & is_dim[None, :], other=0.0
    )
    position = tl.where(is_query, length - new_tokens + new_token, -1)
    table_ptr = rows.page_table + row * rows.table_stride
    in_tile = _tokens_of_tile()
    if leaves_logs:
        asks = tl.load(page_logs.asking + row) != 0
    highest = tl.full([block], _NO_MASS, tl.float32)
    # Sums over a whole tile make the warps of a small block wait for each other; of a large one each has whole rows.
    parts: tl.constexpr = _QUARTERS if leaves_logs or block <= _SMALL_BLOCK else 1
    mass = tl.zeros([block, parts], tl.float32)
    weighted = tl.zeros([block, heads.dim_block], tl.float32)
    for tile in tl.range(begin, tl.minimum(begin + of_split, tiles), num_stages=stages):
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
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        fade = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        of_parts = _sums_of_parts(weights, parts)
        mass = mass * fade[:, None] + of_parts
        weighted = tl.dot(weights.to(value.dtype), value, weighted * fade[:, None], input_precision="ieee")
        highest = higher
        if leaves_logs:  # noqa: SIM102  # The one is decided when the kernel is compiled.
            # Rows that do not ask wait for no logarithms.
            if asks:
                pair = row * heads.kv_heads + kv_head
                _leave_logs(page_logs, rows, pair, member, new_tokens * heads.group, of_parts, higher, tile, length)
    mass = tl.sum(mass, axis=1)
    saw = mass > 0.0
    # Of padding, and of queries before all that a split has, nothing is seen: neither logarithms nor quotients of 0.
    mass = tl.where(saw, mass, 1.0)
    of_split_ptr = (token * (heads.kv_heads * heads.group) + head) * _SPLITS + split
    tl.store(partial.masses + of_split_ptr, tl.where(saw, highest + tl.log2(mass), _NO_MASS), mask=is_query)
    tl.store(
        partial.outputs + of_split_ptr[:, None] * heads.head_dim + dim[None, :],
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
def _sums_of_parts(weights: tl.tensor, parts: tl.constexpr) -> tl.tensor:
    """Return the sums of ``weights``, [queries, tokens of a tile] as they are taken, over its quarters or all of it."""
    columns: tl.constexpr = 8 * _QUARTERS // parts
    by_part = tl.reshape(weights, [weights.shape[0], _TILE // (columns * parts), parts, columns])
    return tl.sum(tl.sum(by_part, axis=3), axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def _leave_logs(
    page_logs: PageLogs,
    rows: Rows,
    pair: tl.tensor,
    member: tl.tensor,
    queries_of_pair: tl.constexpr,
    of_quarters: tl.tensor,
    highest: tl.tensor,
    tile: tl.tensor,
    length: tl.tensor,
) -> None:
    """Store the logarithms of a tile's pages, from sums of [queries, quarters] relative to ``highest``, [queries]."""
    pages: tl.constexpr = _TILE // rows.page_size
    of_pages = tl.sum(tl.reshape(of_quarters, [of_quarters.shape[0], pages, _QUARTERS // pages]), axis=2)
    page = tile * pages + tl.arange(0, pages)
    # Of nothing the logarithm is -inf, of which an exponential is 0 again.
    has_mass = of_pages > 0.0
    logs = tl.log2(tl.where(has_mass, of_pages, 1.0)) + highest[:, None]
    tl.store(
        page_logs.pointer + (pair * page_logs.width + page)[None, :] * queries_of_pair + member[:, None],
        tl.where(has_mass, logs, float("-inf")),
        mask=(member < queries_of_pair)[:, None] & (page * rows.page_size < length)[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(
    partial: CheckPartial,
    rows: Rows,
    output: Vectors,
    sink_logits_ptr: tl.tensor | None,
    heads: Heads,
    new_tokens: tl.constexpr,
    window: tl.constexpr,
    aimed_splits: tl.constexpr,
) -> None:
    """Grid: tokens × query heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(rows.lengths + token // new_tokens)
    tiles = tl.cdiv(length, _TILE) - _first_tile(length, new_tokens, window)
    split = tl.arange(0, _SPLITS)
    present = split < tl.cdiv(tiles, _tiles_of_split(tiles, aimed_splits))
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
