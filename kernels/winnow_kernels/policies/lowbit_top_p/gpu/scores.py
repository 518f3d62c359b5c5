"""Scoring all codes: most of the selection's time, which reading them takes."""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.attend.gpu_softmax import soft_capped
from winnow_kernels.decode.predicted_attention import STEPS
from winnow_kernels.indexes.gpu_key_codes import Codes, factor_of_mean
from winnow_kernels.indexes.key_codes import BLOCK
from winnow_kernels.kernel_arguments import Rows
from winnow_kernels.policies.lowbit_top_p.gpu.state import (
    SPAN,
    UNIT_MARK,
    Policies,
    Scratch,
    Shape,
    bounds_of,
    parts_of,
)
from winnow_kernels.selection.gpu_partition import own_share, owner_of

_BLOCK = tl.constexpr(BLOCK)
# Added to a number below 2^22, it leaves the nearest whole number in the lowest bits.
_MAGIC = tl.constexpr(1.5 * 2**23)
_MAGIC_BITS = tl.constexpr(0x4B400000)
_NOTHING = tl.constexpr(-1e6)
_STEPS = tl.constexpr(STEPS)
_SPAN = tl.constexpr(SPAN)
_UNIT_MARK = tl.constexpr(UNIT_MARK)


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def score_kernel(
    rows: Rows,
    policies: Policies,
    codes: Codes,
    shape: Shape,
    scratch: Scratch,
    cap_steps: tl.tensor | None,
    pairs: tl.tensor,
    window: tl.constexpr,
    pair_block: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
    in_words: tl.constexpr,
    again: tl.constexpr,
) -> None:
    """Mark the scored tokens, add up the masses of spans, and find the highest step of each query head.

    ``cap_steps``, in steps, bounds the scores of keys; None for no cap.

    ``again``, with other bases, for the query heads whose marks do not reach. What stands behind the last scored token
    is marked too, up to the end of its tile.
    """
    if again:  # noqa: SIM102  # A condition of the launch and one of the batch.
        if tl.load(scratch.any_open) == 0:
            return
    lines: tl.constexpr = tile * shape.padded_group // shape.columns
    all_pairs = tl.arange(0, pair_block)
    spans = parts_of(rows, policies, all_pairs, pairs, shape, window, _SPAN)
    if again:
        # All programs share the few pairs that are left.
        each = all_pairs[:, None] * shape.padded_group + tl.arange(0, shape.padded_group)[None, :]
        is_open = tl.load(scratch.open + each, mask=(all_pairs < pairs)[:, None], other=0) != 0
        spans = tl.where(tl.max(is_open.to(tl.int32), 1) > 0, spans, 0)
    column = tl.arange(0, shape.columns)
    head = column % shape.padded_group
    number = tl.arange(0, lines)[:, None] * shape.columns + column[None, :]
    own, end = own_share(spans)
    while own < end:
        pair, first, after = owner_of(own, spans)
        last = tl.minimum(end, after)
        of_pair = pair.to(tl.int64)
        of_heads = of_pair * shape.padded_group + head
        is_marked = head < shape.group
        if again:
            is_marked &= tl.load(scratch.open + of_heads) != 0
        row, kv_head = (pair // shape.kv_heads).to(tl.int64), pair % shape.kv_heads
        _, scored, sinks = bounds_of(rows, policies, row, window)
        query = query_of(scratch, pair, codes, shape)
        bases = tl.load(scratch.bases + of_heads)
        zeros = bases + _MAGIC_BITS
        # What a shifted score is to be multiplied with and added to, to be a logarithm in the units of masses.
        to_logarithms = -((bases + _UNIT_MARK).to(tl.float32) + _MAGIC) * (1.0 / _STEPS)
        marks_ptr = scratch.marks + of_pair * scratch.tokens * shape.padded_group + number
        masses_ptr = scratch.masses + of_pair * scratch.spans * shape.columns + column
        highest = tl.zeros([lines, shape.columns], tl.float32)
        masses = tl.zeros([lines, shape.columns], tl.float32)
        behind = tl.minimum((last - first) * _SPAN, scored)
        # One loop over all spans: where one ends, the next tile's codes are on their way already.
        for begin in tl.range((own - first) * _SPAN, behind, tile, num_stages=stages):
            scores = scores_of_tile(rows, row, kv_head, begin, scored, sinks, codes, shape, query, tile, in_words)
            shifted = _bounded(scores, cap_steps) + _MAGIC
            highest = tl.maximum(highest, shifted)
            masses += tl.exp2(shifted * (1.0 / _STEPS) + to_logarithms[None, :])
            marks = bytes_of(shifted.to(tl.int32, bitcast=True) - zeros[None, :], in_words)
            if again:
                tl.store(marks_ptr + begin * shape.padded_group, marks, mask=is_marked[None, :])
            else:
                tl.store(marks_ptr + begin * shape.padded_group, marks)
            done = begin + tile
            if (done // _SPAN * _SPAN == done) | (done >= behind):
                tl.store(masses_ptr + begin // _SPAN * shape.columns, tl.sum(masses, 0), mask=is_marked)
                masses = tl.zeros([lines, shape.columns], tl.float32)
        if not again:
            tops = tl.max(highest, 0).to(tl.int32, bitcast=True) - _MAGIC_BITS
            tl.atomic_max(scratch.tops + of_heads, tops, mask=is_marked, sem="relaxed")
        own = last


@triton.jit  # type: ignore[untyped-decorator]
def _bounded(scores: tl.tensor, cap_steps: tl.tensor | None) -> tl.tensor:
    """Return scores with their cap, if they have one; what is not scored stays so low that it has no mass."""
    if cap_steps is None:
        return scores
    else:  # noqa: RET505  # Triton compiles only the branch taken, and needs to see that there is no other.
        return tl.where(scores > 0.5 * _NOTHING, soft_capped(scores, cap_steps), scores)


@triton.jit  # type: ignore[untyped-decorator]
def bytes_of(numbers: tl.tensor, in_words: tl.constexpr) -> tl.tensor:
    """Return the nearest numbers between 0 and 255: uint8."""
    if in_words:
        return tl.inline_asm_elementwise(_PACK, "=r,r,r,r,r", [numbers], dtype=tl.uint8, is_pure=True, pack=4)
    return tl.minimum(tl.maximum(numbers, 0), 255).to(tl.uint8)


# Four numbers a register, each cut off where it does not fit.
_PACK = tl.constexpr("{.reg .b32 t; cvt.pack.sat.u8.s32.b32 t, $4, $3, 0; cvt.pack.sat.u8.s32.b32 $0, $2, $1, t;}")


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _words(shift: int, bits: int) -> str:
    mask = (2**bits - 1) * 0x01010101
    return f"{{.reg .b32 t; shr.b32 t, $1, {shift}; and.b32 $0, t, {mask};}}"


@triton.jit  # type: ignore[untyped-decorator]
def plane_of(packed: tl.tensor, shift: tl.constexpr, bits: tl.constexpr, in_words: tl.constexpr) -> tl.tensor:
    """Return the codes at one place of every byte: int8."""
    if in_words:
        # Four bytes at a time, which the compiler would take one by one.
        return tl.inline_asm_elementwise(_words(shift, bits), "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)
    return ((packed >> shift) & (2**bits - 1)).to(tl.int8)


@triton.jit  # type: ignore[untyped-decorator]
def _levels_at(
    levels_ptr: tl.tensor,
    part: tl.constexpr,
    of_byte: tl.constexpr,
    of_token: tl.constexpr,
    own_bytes: tl.constexpr,
    tokens: tl.constexpr,
    shape: Shape,
    head_dim: tl.constexpr,
) -> tl.tensor:
    place = tl.arange(0, tokens * of_token)
    column = tl.arange(0, shape.columns)
    head = column % shape.padded_group
    byte = place % of_token
    is_own = (byte < own_bytes)[:, None] & (head < shape.group)[None, :]
    if tokens > 1:
        is_own &= (place // of_token)[:, None] == (column // shape.padded_group)[None, :]
    channel = byte * of_byte + part
    return tl.load(levels_ptr + head[None, :] * head_dim + channel[:, None], mask=is_own, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def levels_of(
    levels_ptr: tl.tensor,
    bits: tl.constexpr,
    of_token: tl.constexpr,
    own_bytes: tl.constexpr,
    tokens: tl.constexpr,
    shape: Shape,
    head_dim: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the levels that meet the codes at each place of a byte: int8 [tokens × bytes of a token, columns] each.

    Args:
        levels_ptr: the pair's levels.
        bits: of a code.
        of_token: bytes of a token, a power of two, of which ``own_bytes`` mean something.
        own_bytes: see there.
        tokens: that share a row of codes; each has columns of its own. With one, all columns are of this one.
        shape: of the layer.
        head_dim: of a key.
    """
    of_byte: tl.constexpr = 8 // bits
    l0 = _levels_at(levels_ptr, 0, of_byte, of_token, own_bytes, tokens, shape, head_dim)
    l1 = _levels_at(levels_ptr, 1, of_byte, of_token, own_bytes, tokens, shape, head_dim)
    levels = (l0, l1)
    if bits < 4:
        l2 = _levels_at(levels_ptr, 2, of_byte, of_token, own_bytes, tokens, shape, head_dim)
        l3 = _levels_at(levels_ptr, 3, of_byte, of_token, own_bytes, tokens, shape, head_dim)
        levels = (l0, l1, l2, l3)  # type: ignore[assignment]
        if bits == 1:
            l4 = _levels_at(levels_ptr, 4, of_byte, of_token, own_bytes, tokens, shape, head_dim)
            l5 = _levels_at(levels_ptr, 5, of_byte, of_token, own_bytes, tokens, shape, head_dim)
            l6 = _levels_at(levels_ptr, 6, of_byte, of_token, own_bytes, tokens, shape, head_dim)
            l7 = _levels_at(levels_ptr, 7, of_byte, of_token, own_bytes, tokens, shape, head_dim)
            levels = (l0, l1, l2, l3, l4, l5, l6, l7)  # type: ignore[assignment]
    return levels


@triton.jit  # type: ignore[untyped-decorator]
def products(packed: tl.tensor, levels: tl.tuple, bits: tl.constexpr, in_words: tl.constexpr) -> tl.tensor:
    """Return the sums of level × code: int32 [rows, columns], of packed codes, uint8 [rows, bytes]."""
    total = tl.dot(plane_of(packed, 0, bits, in_words), levels[0], out_dtype=tl.int32)
    for part in tl.static_range(1, 8 // bits):
        total = tl.dot(plane_of(packed, part * bits, bits, in_words), levels[part], total, out_dtype=tl.int32)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def query_of(scratch: Scratch, pair: tl.tensor, codes: Codes, shape: Shape) -> tuple[tl.tensor, ...]:
    """Return the pair's query as it meets codes: levels for means, for codes and for their lowest bits.

    Behind them what a level is worth, in half steps, and the sum of all levels, in steps: float32 [columns].
    """
    head_dim: tl.constexpr = codes.head_dim
    bits: tl.constexpr = codes.bits
    of_row: tl.constexpr = shape.columns // shape.padded_group
    of_heads = pair.to(tl.int64) * shape.padded_group + tl.arange(0, shape.columns) % shape.padded_group
    levels_ptr = scratch.levels + pair.to(tl.int64) * shape.padded_group * head_dim
    mean_bytes: tl.constexpr = head_dim // 2
    for_means = levels_of(levels_ptr, 4, padded_bytes(mean_bytes, 1), mean_bytes, 1, shape, head_dim)
    higher: tl.constexpr = 2 if bits == 3 else bits
    own: tl.constexpr = head_dim * higher // 8
    for_codes = levels_of(levels_ptr, higher, padded_bytes(own, of_row), own, of_row, shape, head_dim)
    for_lowest = for_means
    if bits == 3:
        lowest: tl.constexpr = head_dim // 8
        for_lowest = levels_of(levels_ptr, 1, padded_bytes(lowest, of_row), lowest, of_row, shape, head_dim)
    worths = tl.load(scratch.worths + of_heads)
    return (for_means, for_codes, for_lowest, 2 * worths, worths * tl.load(scratch.sums + of_heads).to(tl.float32))


@triton.constexpr_function  # type: ignore[untyped-decorator]
def padded_bytes(own: int, tokens: int) -> int:
    """Return the bytes of a token in a row of codes: a power of two, and 32 in a row at least.

    SGLang replaces Triton's own next power of two by a function that kernels cannot call.
    """
    return max(1 << (own - 1).bit_length(), 32 // tokens)


@triton.jit  # type: ignore[untyped-decorator]
def scores_of_tile(
    rows: Rows,
    row: tl.tensor,
    kv_head: tl.tensor,
    begin: tl.tensor,
    scored: tl.tensor,
    sinks: tl.tensor,
    codes: Codes,
    shape: Shape,
    query: tl.tuple,
    tile: tl.constexpr,
    in_words: tl.constexpr,
) -> tl.tensor:
    """Return the predicted scores of a tile's tokens, in steps: float32 [lines, columns], token by token.

    Those of sinks, and of what is not scored, are so low that they have no mass.

    Args:
        rows: of the batch.
        row: whose context.
        kv_head: whose keys.
        begin: the tile's first token.
        scored: tokens, whole blocks.
        sinks: first tokens, whole blocks.
        codes: of the layer.
        shape: of the layer.
        query: of the pair (``query_of``).
        tile: tokens.
        in_words: whether to unpack codes by words.
    """
    for_means, for_codes, for_lowest, worths, sums = query
    head_dim: tl.constexpr = codes.head_dim
    bits: tl.constexpr = codes.bits
    blocks: tl.constexpr = tile // _BLOCK
    of_row: tl.constexpr = shape.columns // shape.padded_group
    in_block: tl.constexpr = _BLOCK // of_row
    line = tl.arange(0, tile // of_row)
    line_block = block_at(rows, row, begin, line // in_block, scored)
    # Loading the table twice, for lines and for blocks, would be waited for.
    each = tl.arange(0, blocks)
    block = tl.max(tl.reshape(line_block, [blocks, in_block]), 1) * codes.kv_heads + kv_head
    mean_bytes: tl.constexpr = head_dim // 2
    byte = tl.arange(0, padded_bytes(mean_bytes, 1))
    block_bytes: tl.constexpr = codes.block_bytes
    packed = tl.load(
        codes.means + block[:, None] * block_bytes + byte[None, :], mask=(byte < mean_bytes)[None, :], other=0
    )
    means = products(packed, for_means, 4, in_words).to(tl.float32) * worths[None, :] - 15 * sums[None, :]
    of_block = codes.factors + (block * (block_bytes // 2))[:, None] + tl.arange(0, _BLOCK)[None, :]
    means *= factor_of_mean(tl.load(of_block))[:, None]
    token = begin + each * _BLOCK
    means = tl.where(((token >= sinks) & (token < scored))[:, None], means, _NOTHING)
    means = tl.broadcast_to(means[:, None, :], [blocks, in_block, shape.columns])

    own_block = line_block * codes.kv_heads + kv_head
    first_in_block = line % in_block * of_row
    own_bytes: tl.constexpr = head_dim * bits // 8
    higher: tl.constexpr = 2 if bits == 3 else bits
    own_higher: tl.constexpr = head_dim * higher // 8
    of_token: tl.constexpr = padded_bytes(own_higher, of_row)
    place = tl.arange(0, of_row * of_token)
    codes_ptr = codes.codes + (own_block * block_bytes + first_in_block * own_bytes)[:, None]
    packed = tl.load(
        codes_ptr + (place // of_token * own_bytes + place % of_token)[None, :],
        mask=(place % of_token < own_higher)[None, :],
        other=0,
    )
    values = products(packed, for_codes, higher, in_words).to(tl.float32)
    values = values * worths[None, :] - (sums * (2.0**higher - 1))[None, :]
    if bits == 3:
        own_lowest: tl.constexpr = head_dim // 8
        of_lowest: tl.constexpr = padded_bytes(own_lowest, of_row)
        low = tl.arange(0, of_row * of_lowest)
        packed = tl.load(
            codes_ptr + (low // of_lowest * own_bytes + own_higher + low % of_lowest)[None, :],
            mask=(low % of_lowest < own_lowest)[None, :],
            other=0,
        )
        lowest = products(packed, for_lowest, 1, False).to(tl.float32)
        values = 2 * values + lowest * worths[None, :] - sums[None, :]
    in_row = tl.arange(0, of_row)
    line_factors = own_block * (block_bytes // 2) + first_in_block
    factors = tl.abs(tl.load(codes.factors + line_factors[:, None] + in_row[None, :]).to(tl.float32))
    factors = tl.broadcast_to(factors[:, :, None], [tile // of_row, of_row, shape.padded_group])
    factors = tl.reshape(factors, [tile // of_row, shape.columns])
    return values * factors + tl.reshape(means, [tile // of_row, shape.columns])


@triton.jit  # type: ignore[untyped-decorator]
def block_at(rows: Rows, row: tl.tensor, begin: tl.tensor, place: tl.tensor, scored: tl.tensor) -> tl.tensor:
    """Return the blocks of a context that lie at places behind its token ``begin``; int64. The last one scored is the
    last.
    """
    of_page: tl.constexpr = rows.page_size // _BLOCK
    number = tl.minimum(begin // _BLOCK + place, scored // _BLOCK - 1)
    page = tl.load(rows.page_table + row * rows.table_stride + number // of_page)
    return page.to(tl.int64) * of_page + number % of_page
