"""Attention of a prefill pass's blocks over their selections and causally over their own tokens, in one launch.

A program attends from a tile of rows of one block and KV head. A row is a query and one of the group's query heads,
query heads first, so that a tile is full whatever the block and the group, and its queries' causal bounds lie close
together. It reads the selected slots, then the tokens from the block's start on through the page table, up to the
tile's last query; with ``WHOLE`` everything lies in the second part. Both are gathered row by row. The tiles of a block
and KV head read the same slots and are launched side by side: all but the first read K and V from L2.

What it costs are the products, 4 × head dim × rows × tokens operations. By its instructions, the softmax of a tile of
tokens takes about as long as one of its two products, so the loop is turned by half a round: it multiplies Q with the
next keys, starts P with the present values, and computes the softmax of the next scores while that product runs. For
this the weights are carried in float32 and rounded to the cache's dtype when they are multiplied: rounded ones would be
carried through shared memory, and the product waited for. The loop has one round more than there are tiles: in its
first there are no weights yet. With head dim 256 the assembler does not overlap anything, for reasons of its own.

A pair of queries and tokens costs the same in all blocks, so that whole contexts, which dense requests of a mixed pass
have, run as fast; their causal tiles are masked, the others not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.attend.gpu_merge import INFINITY
from winnow_kernels.attend.gpu_softmax import grown_by_sinks, sinks_log2, soft_capped
from winnow_kernels.cache import LayerCache
from winnow_kernels.kernel_arguments import Heads, KeysAndValues, Number, Pointer, Vectors
from winnow_kernels.policies.quoka.prefill.tables import (
    BEGIN,
    BLOCK_COLUMNS,
    BUDGET,
    END,
    FIRST_QUERY,
    REQUEST,
    START,
    Blocks,
)
from winnow_kernels.prefill.blocks import PrefillBlocks

if TYPE_CHECKING:
    from winnow_kernels.policies.quoka.prefill.selection import BlockSelection

LARGEST_GROUP: Final = 16
_LOG2_E: Final = 1.4426950408889634


@dataclass(frozen=True)
class Launch:
    """How the kernel runs, which changes its speed and the order of additions.

    Attributes:
        rows: of a program's tile: queries × query heads of a group.
        tokens: of a tile of keys and values.
        warps: of a program; on tensor cores four for each 64 rows.
        stages: tiles of keys and values in shared memory.
        registers: of a thread, at most; None for as many as there are. With 128 and 8 warps two programs fit.
    """

    rows: int = 128
    tokens: int = 64
    warps: int = 8
    stages: int = 3
    registers: int | None = None

    @classmethod
    def of(cls, head_dim: int, element_size: int) -> Launch:
        """Return what fits the registers and shared memory of a Hopper multiprocessor."""
        if element_size > 2:
            # Not on tensor cores.
            return cls(rows=16, tokens=32, warps=4, stages=2)
        if triton.next_power_of_2(head_dim) > 128:
            return cls(tokens=32)
        if triton.next_power_of_2(head_dim) > 64:
            # Two programs of a multiprocessor hide each other's waits.
            return cls(tokens=32, registers=128)
        return cls()


def attend_blocks(
    queries: Tensor,
    cache: LayerCache,
    blocks: PrefillBlocks,
    selection: BlockSelection,
    scale: float,
    output: Tensor,
    launch: Launch | None = None,
) -> None:
    """Attend from each block's queries to what it selected, and causally to the tokens from its start on.

    What a block gets depends on its own fields, selection and request alone. Keys and values of the whole pass must be
    in the cache. The selection of a block whose budget is ``WHOLE`` is not read.

    Args:
        queries: [queries of the pass, query heads, head dim], in the cache's dtype, or any other of these if that is
            narrow; query heads of a KV head, at most 16, lie next to each other. Queries and heads may be strided.
        cache: the layer's KV cache: bfloat16, float16, float32 or narrow, slots and heads strided alike in keys and
            values; and its softmax's cap and sink logits.
        blocks: of all requests of the pass.
        selection: slots [blocks, KV heads, width], contiguous; the first ``budget`` of each are attended to.
        scale: what scores are multiplied by before the softmax; more than 0.
        output: [queries of the pass, query heads, head dim]; queries and heads may be strided. Queries in no block
            are left as they are.
        launch: how the kernel runs; None for what suits the head dim.
    """
    if not blocks.blocks:
        return
    query_heads = queries.shape[1]
    group = query_heads // cache.kv_heads
    slots = selection.slots
    assert group <= LARGEST_GROUP
    assert slots.is_contiguous()
    launch = launch or Launch.of(cache.head_dim, queries.element_size())
    most_queries = max(block.queries for block in blocks.blocks)
    attend_blocks_kernel[(triton.cdiv(most_queries * group, launch.rows), cache.kv_heads, len(blocks.blocks))](
        Vectors.of(queries),
        KeysAndValues.of(cache),
        Blocks.of(blocks),
        slots,
        Vectors.of(output),
        Heads.of(query_heads, cache),
        scale * _LOG2_E,
        cache.softmax.cap_log2,
        cache.softmax.sink_logits,
        slots.shape[2],
        tile_rows=launch.rows,
        tile_tokens=launch.tokens,
        stages=launch.stages,
        num_warps=launch.warps,
        maxnreg=launch.registers,
    )


class Tiles(NamedTuple):
    """What a program's rows attend to, in tiles of tokens: first those selected, then its own from the origin on.

    An entry is a selected slot, or the page of a token.
    """

    selected_tiles: Number
    selected: Number
    own: Number
    origin: Number
    selection: Pointer
    pages: Pointer
    in_tile: Pointer


@triton.jit(do_not_specialize=["selection_width"])  # type: ignore[untyped-decorator]
def attend_blocks_kernel(  # noqa: PLR0915  # A kernel's state cannot be handed around in parts.
    queries: Vectors,
    cache: KeysAndValues,
    blocks: Blocks,
    slots_ptr: tl.tensor,
    output: Vectors,
    heads: Heads,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    sink_logits_ptr: tl.tensor | None,
    selection_width: tl.tensor,
    tile_rows: tl.constexpr,
    tile_tokens: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """Attend from a tile of rows. The last blocks come first: with ``WHOLE`` they take longest."""
    block = tl.num_programs(2) - 1 - tl.program_id(2)
    kv_head = tl.program_id(1)
    first_row = tl.program_id(0) * tile_rows
    block_ptr = blocks.fields + block * BLOCK_COLUMNS
    start = tl.load(block_ptr + START)
    begin = tl.load(block_ptr + BEGIN)
    count = tl.load(block_ptr + END) - begin
    if first_row < count * heads.group:
        page_row = tl.load(block_ptr + REQUEST)
        first_query = tl.load(block_ptr + FIRST_QUERY)
        budget = tl.load(block_ptr + BUDGET)
        packed = first_row + tl.arange(0, tile_rows)
        row = packed // heads.group
        head = kv_head * heads.group + packed % heads.group
        dim = tl.arange(0, heads.dim_block)
        is_row = (row < count)[:, None] & (dim < heads.head_dim)[None, :]
        of_rows = (first_query + row).to(tl.int64) * queries.row_stride + head * queries.head_stride
        query = tl.load(queries.pointer + of_rows[:, None] + dim[None, :], mask=is_row, other=0.0)

        # Tiles of tokens: first those selected, then those from the origin on, both numbered from 0.
        selected = tl.maximum(budget, 0)
        origin = tl.where(budget < 0, 0, start)
        last_row = tl.minimum((first_row + tile_rows - 1) // heads.group, count - 1)
        seen = begin + row + 1 - origin
        seen_by_all = begin + first_row // heads.group + 1 - origin
        seen_by_any = begin + last_row + 1 - origin
        selected_tiles = tl.cdiv(selected, tile_tokens)
        tiles = selected_tiles + tl.cdiv(seen_by_any, tile_tokens)
        selection_ptr = slots_ptr + (block * tl.num_programs(1) + kv_head).to(tl.int64) * selection_width
        pages_ptr = blocks.page_table + page_row.to(tl.int64) * blocks.table_stride

        in_tile = tl.arange(0, tile_tokens)
        key_ptrs = cache.keys_ptr + kv_head * cache.head_stride + dim[None, :]
        value_ptrs = cache.values_ptr + kv_head * cache.head_stride + dim[None, :]
        highest = tl.full([tile_rows], -INFINITY, tl.float32)
        mass = tl.zeros([tile_rows], tl.float32)
        fade = tl.zeros([tile_rows], tl.float32)
        weights = tl.zeros([tile_rows, tile_tokens], tl.float32)
        weighted = tl.zeros([tile_rows, heads.dim_block], tl.float32)
        read = Tiles(selected_tiles, selected, seen_by_any, origin, selection_ptr, pages_ptr, in_tile)
        # An entry is loaded a round before its slot is needed.
        entry = _load_entries(read, blocks, 0, tile_tokens)
        # In the first round values have no weight, but may not be nan: they are some that will have.
        slot = _slots(read, blocks, 0, entry, tile_tokens)
        for number in tl.range(-1, tiles, num_stages=stages):
            next_slot = _slots(read, blocks, number + 1, entry, tile_tokens)
            entry = _load_entries(read, blocks, number + 2, tile_tokens)
            of_keys = next_slot.to(tl.int64) * cache.slot_stride
            of_values = slot.to(tl.int64) * cache.slot_stride
            if heads.head_dim == heads.dim_block:
                key = tl.load(key_ptrs + of_keys[:, None])
                value = tl.load(value_ptrs + of_values[:, None])
            else:
                is_element = (dim < heads.head_dim)[None, :]
                key = tl.load(key_ptrs + of_keys[:, None], mask=is_element, other=0.0)
                value = tl.load(value_ptrs + of_values[:, None], mask=is_element, other=0.0)
            key, value = key.to(query.dtype), value.to(query.dtype)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee")
            weighted = tl.dot(weights.to(value.dtype), value, weighted * fade[:, None], input_precision="ieee")

            if cap_log2 is not None:
                # In units in which they are still to be scaled.
                scores = soft_capped(scores, cap_log2 / scale_log2)
            is_own = number + 1 >= selected_tiles
            behind = (number + 1 - tl.where(is_own, selected_tiles, 0)) * tile_tokens
            if tl.where(is_own, seen_by_all, selected) - behind < tile_tokens:
                bound = tl.where(is_own, seen, selected) - behind
                scores = tl.where(in_tile[None, :] < bound[:, None], scores, -INFINITY)
            new_highest = tl.maximum(highest, tl.max(scores, axis=1) * scale_log2)
            fade = tl.exp2(highest - new_highest)
            weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
            mass = mass * fade + tl.sum(weights, axis=1)
            highest = new_highest
            slot = next_slot

        # Rows are computed again, from what is loaded again: else they would take registers through the loop.
        zero = tl.load(block_ptr + END) - begin - count
        packed = zero + first_row + tl.arange(0, tile_rows)
        row = packed // heads.group
        head = kv_head * heads.group + packed % heads.group
        is_row = (row < count)[:, None] & (dim < heads.head_dim)[None, :]
        of_rows = (tl.load(block_ptr + FIRST_QUERY) + row).to(tl.int64) * output.row_stride + head * output.head_stride
        if sink_logits_ptr is not None:
            mass = mass * grown_by_sinks(sinks_log2(sink_logits_ptr, head, row < count), highest + tl.log2(mass))
        result = (weighted / mass[:, None]).to(output.pointer.dtype.element_ty)
        tl.store(output.pointer + of_rows[:, None] + dim[None, :], result, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _load_entries(read: Tiles, blocks: Blocks, number: tl.tensor, tile_tokens: tl.constexpr) -> tl.tensor:
    """Return the selected slots of a tile, or the pages of its tokens: int32 [tile tokens]."""
    is_own = number >= read.selected_tiles
    place = _places(read, number, tile_tokens)
    entries_ptr = tl.where(is_own, read.pages, read.selection)
    return tl.load(entries_ptr + (place >> tl.where(is_own, blocks.page_bits, 0)))


@triton.jit  # type: ignore[untyped-decorator]
def _slots(read: Tiles, blocks: Blocks, number: tl.tensor, entry: tl.tensor, tile_tokens: tl.constexpr) -> tl.tensor:
    """Return the slots of a tile's tokens."""
    is_own = number >= read.selected_tiles
    place = _places(read, number, tile_tokens)
    return (entry << tl.where(is_own, blocks.page_bits, 0)) + (place & tl.where(is_own, blocks.page_size - 1, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _places(read: Tiles, number: tl.tensor, tile_tokens: tl.constexpr) -> tl.tensor:
    """Return where the tokens of a tile are: in the selection or the context; behind the last there is, the last.

    So there is a token everywhere, and loads need no masks.
    """
    is_own = number >= read.selected_tiles
    first = (number - tl.where(is_own, read.selected_tiles, 0)) * tile_tokens
    last = tl.where(is_own, read.own, read.selected) - 1
    return tl.where(is_own, read.origin, 0) + tl.minimum(first + read.in_tile, last)
