"""What the kernels of a selection hand on to each other.

A pair is a row and a KV head, number row × KV heads + KV head. Scores are whole steps, eighths of a doubling.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.decode.coded_tokens import WHOLE_SHARE
from winnow_kernels.decode.predicted_attention import FLOOR, LOWEST_KEY, ORDER_KEYS, STEPS
from winnow_kernels.indexes.key_codes import BLOCK
from winnow_kernels.kernel_arguments import Constant, Number, Pointer, Rows
from winnow_kernels.policies.lowbit_top_p.parameters import WHOLE_ABOVE

SPAN: Final = 1024
"""Tokens whose masses one program adds up."""
SPARE: Final = 12
"""Steps below what the last steps' cuts let expect from which on tokens are counted."""
WORDS: Final = 512
"""Words of four marks that one program looks at together."""
MARKS: Final = 256
"""What a token's step is written down as: so much above its head's base, from 0. The last is no token's."""
KEYS: Final = triton.next_power_of_2(1 - LOWEST_KEY)
"""Keys, from 0, and some more."""
ORDERS: Final = triton.next_power_of_2(1 - LOWEST_KEY // ORDER_KEYS)
"""Steps of an order, and some more."""
CHUNK: Final = 128
"""Listed tokens that one program puts in order."""
UNIT_MARK: Final = -FLOOR * STEPS
"""The mark in whose weight masses are added up."""
IS_OPEN: Final = 1
"""What is not settled yet."""
WAS_OPEN: Final = 2
"""What was not settled the first time."""

_UNKNOWN: Final = -(2**30)
_STEPS = tl.constexpr(STEPS)
_UNIT_MARK = tl.constexpr(UNIT_MARK)
_BLOCK = tl.constexpr(BLOCK)
_WHOLE_SHARE = tl.constexpr(WHOLE_SHARE)
_WHOLE_ABOVE = tl.constexpr(WHOLE_ABOVE)


class Policies(NamedTuple):
    """What the rows ask for.

    acts: int32 [rows], not 0 in rows of this kind; shares: float64 [rows], of ``lowbit_top_p``; sinks, least, most:
    int32 [rows], least and most tokens, 0 for no bound; budgets: int32 [rows], of ``lowbit_top_k``; by_score: int32
    [rows], not 0 where the order of a selection matters.
    """

    acts: Pointer
    shares: Pointer
    sinks: Pointer
    least: Pointer
    most: Pointer
    budgets: Pointer
    by_score: Pointer


class Shape(NamedTuple):
    """A layer's heads as codes are scored: several tokens share a row of the matrix units where a group is small.

    A unit is what a program lists, and whose slots it writes.
    """

    kv_heads: Constant
    group: Constant
    padded_group: Constant
    columns: Constant
    unit: Constant

    @classmethod
    def of(cls, kv_heads: int, group: int) -> Shape:
        """Return it for ``group`` query heads of each of ``kv_heads``."""
        padded = triton.next_power_of_2(group)
        return cls(
            *(tl.constexpr(size) for size in (kv_heads, group, padded, max(8, padded), WORDS * 4 // max(4, padded)))
        )


class Anchors(NamedTuple):
    """Where a request's last step found what this one seeks. They make a selection fast, and never change it.

    slots: int64 [rows], the rows' request slots; tops: int32 [slots, query heads], the highest step; cuts: int32
    [slots, query heads], how far above its floor a head's cut lay, in the last step or, if that was lower, in one
    before; ends: int32, same shape, the cut itself, likewise, of kernels in CUDA C++ alone; keys: int32 [slots, KV
    heads], the lowest key that was taken.
    """

    slots: Pointer
    tops: Pointer
    cuts: Pointer
    ends: Pointer
    keys: Pointer

    @classmethod
    def empty(cls, slots: int, query_heads: int, kv_heads: int, rows: Tensor) -> Anchors:
        """Return those of ``slots`` requests of which nothing is known yet; ``rows`` become ``slots``."""

        def unknown(heads: int) -> Tensor:
            return torch.full((slots, heads), _UNKNOWN, dtype=torch.int32, device=rows.device)

        return cls(rows, unknown(query_heads), unknown(query_heads), unknown(query_heads), unknown(kv_heads))


class Scratch(NamedTuple):
    """What one layer's selection writes down; the same memory in all layers.

    Of query heads, [pairs, padded group]: levels, int8 [..., head dim], of the rounded queries; sums, int32, of these;
    worths, float32, of a level, in steps; kept, float32, logarithm of the kept tokens' mass, in steps; tops, int32, the
    highest step, in CUDA C++ unknown between selections; bases, int32, the step with the mark 0, a multiple of 8;
    floors, int32, the mark up to which nothing is chosen by itself; starts, int32, the mark from which on tokens are
    counted; open, int32, where bases are wrong, then where starts are (``IS_OPEN``) or were (``WAS_OPEN``); cuts,
    int32, the lowest mark that is taken; totals, float32, of all mass; rests, float32, of what is not selected.

    Of tokens: marks, uint8 [pairs, tokens, padded group], steps above the base; local, int16 [pairs, tokens], which
    tokens of a unit may be taken, then which are, in order, as −1 − token where a budget may end before it; keys,
    int16, same shape, of those that a budget may take.

    Of spans: masses, float32 [pairs, spans, columns], of all scored tokens. Of units, [pairs, units]: counts and ties,
    int32, how many are listed and how many of these are ties; taken, float32 [..., padded group], their mass.

    Of pairs: key_cuts, int32, the lowest key that is taken; key_ties, int32, how many tokens with that key are;
    key_open, int32, where too few are counted, or were.

    All 0 between kernels: histograms, int32 [pairs, padded group, MARKS], of marks; key_histograms, int32 [pairs,
    KEYS]; met, int32 [pairs], how often programs have met.

    To put a selection in order: others, int32 [pairs], how many tokens are listed; listed, int32 [pairs, tokens], their
    positions; orders, uint8, same shape, their steps; order_counts and order_before, int32 [pairs, chunks, ORDERS], how
    many of a chunk are in each step, and how many of earlier chunks are; order_totals, int32 [pairs, ORDERS], of all
    chunks; lost, float32 [pairs, chunks, padded group], the mass that a cap cuts off.

    any_open: int32 [1], whether heads are open that are to be marked again; in CUDA C++ 0 between selections.
    """

    levels: Pointer
    sums: Pointer
    worths: Pointer
    kept: Pointer
    tops: Pointer
    bases: Pointer
    floors: Pointer
    starts: Pointer
    open: Pointer
    cuts: Pointer
    totals: Pointer
    rests: Pointer
    marks: Pointer
    keys: Pointer
    local: Pointer
    masses: Pointer
    counts: Pointer
    ties: Pointer
    taken: Pointer
    key_cuts: Pointer
    key_ties: Pointer
    key_open: Pointer
    histograms: Pointer
    key_histograms: Pointer
    met: Pointer
    others: Pointer
    listed: Pointer
    orders: Pointer
    order_counts: Pointer
    order_before: Pointer
    order_totals: Pointer
    lost: Pointer
    any_open: Pointer
    tokens: Number
    spans: Number
    units: Number
    chunks: Number

    @classmethod
    def empty(
        cls,
        rows: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        tokens: int,
        device: torch.device,
        *,
        with_keys: bool,
        in_triton: bool = True,
    ) -> Scratch:
        """Return that of layers of ``rows`` rows with up to ``tokens`` tokens each.

        Args:
            rows: of a batch.
            kv_heads: of a layer.
            group: query heads of each.
            head_dim: of a key.
            tokens: of a context.
            device: where.
            with_keys: whether there are fixed budgets.
            in_triton: whether Triton lists and takes, or CUDA C++, which has its own lists.
        """
        shape = Shape.of(kv_heads, group)
        pairs, padded = rows * kv_heads, shape.padded_group.value
        spans = -(-tokens // SPAN)
        tokens = spans * SPAN
        units = tokens // shape.unit.value
        chunks = tokens // CHUNK
        key_tokens, keys = (tokens, KEYS) if with_keys else (1, 1)
        local = (tokens, spans, units) if in_triton else (1, 1, 1)

        def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(pairs, *sizes, dtype=dtype, device=device)

        return cls(
            levels=zeros(padded, head_dim, dtype=torch.int8),
            sums=zeros(padded),
            worths=zeros(padded, dtype=torch.float32),
            kept=zeros(padded, dtype=torch.float32),
            tops=zeros(padded) + _UNKNOWN,
            bases=zeros(padded),
            floors=zeros(padded),
            starts=zeros(padded),
            open=zeros(padded),
            cuts=zeros(padded),
            totals=zeros(padded, dtype=torch.float32),
            rests=zeros(padded, dtype=torch.float32),
            marks=zeros(tokens, padded, dtype=torch.uint8),
            keys=zeros(key_tokens, dtype=torch.int16),
            local=zeros(local[0], dtype=torch.int16),
            masses=zeros(local[1], shape.columns.value, dtype=torch.float32),
            counts=zeros(local[2]),
            ties=zeros(local[2]),
            taken=zeros(local[2], padded, dtype=torch.float32),
            key_cuts=zeros(),
            key_ties=zeros(),
            key_open=zeros(),
            histograms=zeros(padded, MARKS),
            key_histograms=zeros(keys),
            met=zeros(),
            others=zeros(),
            listed=zeros(tokens),
            orders=zeros(tokens, dtype=torch.uint8),
            order_counts=zeros(chunks, ORDERS),
            order_before=zeros(chunks, ORDERS),
            order_totals=zeros(ORDERS),
            lost=zeros(chunks, padded, dtype=torch.float32),
            any_open=torch.zeros(1, dtype=torch.int32, device=device),
            tokens=tokens,
            spans=spans,
            units=units,
            chunks=chunks,
        )

    @property
    def bytes(self) -> int:
        """Bytes of device memory."""
        return sum(tensor.nbytes for tensor in self if isinstance(tensor, Tensor))


@triton.jit  # type: ignore[untyped-decorator]
def bounds_of(
    rows: Rows, policies: Policies, row: tl.tensor, window: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a row's length, how many of its first tokens are scored, and how many of these are sinks.

    Nothing is scored in rows of other kinds, and where what is kept is so much that everything is attended to.
    """
    length = tl.load(rows.lengths + row)
    scored = tl.maximum(length - window, 0) // rows.page_size * rows.page_size
    sinks = tl.minimum(tl.cdiv(tl.load(policies.sinks + row), _BLOCK) * _BLOCK, scored)
    is_whole = (length - scored + sinks).to(tl.float32) > length.to(tl.float32) * _WHOLE_SHARE
    is_idle = tl.load(policies.acts + row) == 0
    return length, tl.where(is_whole | is_idle, 0, scored), sinks


@triton.jit  # type: ignore[untyped-decorator]
def own_part(policies: Policies, row_block: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Deal the programs of a KV head out to the rows that act, as if there were no others.

    Grid: some programs × rows × KV heads.

    Args:
        policies: of the rows.
        row_block: a power of two, no less than the rows.

    Returns:
        This program's row, its number among those of the row and KV head, and how many these are: 0 for a program that
        is left over, whose row is any.
    """
    each, rows = tl.arange(0, row_block), tl.num_programs(1)
    acts = tl.load(policies.acts + each, mask=each < rows, other=0) != 0
    up_to = tl.cumsum(acts.to(tl.int32), 0)
    acting = tl.max(up_to, 0)
    sharing = tl.num_programs(0) * rows // tl.maximum(acting, 1)
    number = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    place = number // sharing
    row = tl.minimum(tl.sum((up_to <= place).to(tl.int32), 0), rows - 1)
    return row.to(tl.int64), number % sharing, tl.where(place < acting, sharing, 0)


@triton.jit  # type: ignore[untyped-decorator]
def kept_positions(places: tl.tensor, length: tl.tensor, scored: tl.tensor) -> tl.tensor:
    """Return the positions of what is always attended to, by its places: the newest tokens, then the sinks."""
    newest = length - scored
    return tl.where(places < newest, length - 1 - places, places - newest)


@triton.jit  # type: ignore[untyped-decorator]
def parts_of(
    rows: Rows,
    policies: Policies,
    all_pairs: tl.tensor,
    pairs: tl.tensor,
    shape: Shape,
    window: tl.constexpr,
    size: tl.constexpr,
) -> tl.tensor:
    """Return how many parts of ``size`` tokens each pair has: int32 [pairs]."""
    row = tl.where(all_pairs < pairs, all_pairs // shape.kv_heads, 0)
    _, scored, _ = bounds_of(rows, policies, row, window)
    return tl.where(all_pairs < pairs, tl.cdiv(scored, size), 0)


@triton.jit  # type: ignore[untyped-decorator]
def floor_of(unit: tl.tensor) -> tl.tensor:
    """Return the base that is right where the heavier of what is kept and the heaviest token has the step ``unit``."""
    # Masses in units that differ by a power of two are the same to the last bit.
    return (unit - _UNIT_MARK - 1) & -_STEPS


@triton.jit  # type: ignore[untyped-decorator]
def weights_of(marks: tl.tensor) -> tl.tensor:
    """Return what tokens with these marks weigh, in units of what is ``UNIT_MARK`` steps above the base: float32."""
    return tl.exp2((marks - _UNIT_MARK).to(tl.float32) * (1.0 / _STEPS))


@triton.jit  # type: ignore[untyped-decorator]
def counted_weights(marks: tl.tensor, floors: tl.tensor) -> tl.tensor:
    """Return what tokens weigh, float32 [tokens, padded group], and 0 up to their heads' floors."""
    return tl.where(marks > floors[None, :], weights_of(marks), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def weight_of_kept(kept: tl.tensor, bases: tl.tensor) -> tl.tensor:
    """Return what the kept tokens weigh, in the same units: float32."""
    whole = tl.floor(kept)
    # Apart, what is behind the point is the same to the last bit whatever the base.
    scale = tl.exp2((whole - (bases + _UNIT_MARK).to(tl.float32)) * (1.0 / _STEPS))
    return tl.exp2((kept - whole) * (1.0 / _STEPS)) * scale


@triton.jit  # type: ignore[untyped-decorator]
def surest_start(share: tl.tensor, totals: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """Return the mark below which all ``tokens`` together weigh no more than a share of a total leaves: int32."""
    weight = (1.0 - share).to(tl.float32) * totals / tokens.to(tl.float32)
    # One less, for what rounding adds up to.
    start = tl.floor(tl.log2(tl.maximum(weight, 1e-30)) * _STEPS).to(tl.int32) + _UNIT_MARK - 1
    return tl.where(share > _WHOLE_ABOVE, 0, tl.maximum(start, 1))


@triton.jit  # type: ignore[untyped-decorator]
def logarithm_of(mass: tl.tensor, bases: tl.tensor) -> tl.tensor:
    """Return the logarithm, base 2, of a mass in these units."""
    return (bases + _UNIT_MARK).to(tl.float32) * (1.0 / _STEPS) + tl.log2(tl.maximum(mass, 1e-30))


@triton.jit  # type: ignore[untyped-decorator]
def is_in_order(policies: Policies, row: tl.tensor) -> tl.tensor:
    """Return whether the order of a row's selections matters."""
    return (tl.load(policies.by_score + row) != 0) | (tl.load(policies.most + row) > 0)
