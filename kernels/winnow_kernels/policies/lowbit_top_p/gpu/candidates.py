"""Listing which tokens may be selected, from the marks of all: what comes after looks at these alone."""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.policies.lowbit_top_p.gpu.state import MARKS, Scratch, Shape
from winnow_kernels.selection.gpu_lists import ranks_of

_LINE = tl.constexpr(16)
_HIGHEST = tl.constexpr(MARKS - 1)
_HIGH_BITS = tl.constexpr(-0x7F7F7F80)
_LOW_BITS = tl.constexpr(0x7F7F7F7F)


@triton.jit  # type: ignore[untyped-decorator]
def list_candidates(
    scratch: Scratch,
    pair: tl.tensor,
    unit: tl.tensor,
    sinks: tl.tensor,
    scored: tl.tensor,
    starts: tl.tensor,
    shape: Shape,
) -> tl.tensor:
    """List the tokens of a unit one of whose marks reaches its head's start, in order, and return how many they are.

    Args:
        scratch: with the marks; gets the list and its length.
        pair: of the unit.
        unit: its number.
        sinks: first tokens, which are none.
        scored: tokens, behind which there are none.
        starts: int32 [padded group]; from ``MARKS`` − 1 on of none.
        shape: of the layer.
    """
    lines: tl.constexpr = shape.unit // _LINE
    of_unit = pair * scratch.tokens + unit * shape.unit
    place = tl.arange(0, lines)[:, None] * _LINE + tl.arange(0, _LINE)[None, :]
    token = unit * shape.unit + place
    is_listed = _reach(scratch.marks + of_unit * shape.padded_group, starts, shape)
    is_listed = tl.reshape(is_listed, [lines, _LINE]) & (token >= sinks) & (token < scored)
    ranks, listed = ranks_of(is_listed)
    tl.store(scratch.local + of_unit + ranks, place.to(tl.int16), mask=is_listed)
    tl.store(scratch.counts + pair * scratch.units + unit, listed)
    return listed


@triton.jit  # type: ignore[untyped-decorator]
def marks_at(scratch: Scratch, tokens: tl.tensor, is_token: tl.tensor, shape: Shape) -> tl.tensor:
    """Return the marks of ``tokens``, numbered through all pairs: int32 [tokens, padded group]; 0 for none."""
    head = tl.arange(0, shape.padded_group)
    marks_ptr = scratch.marks + tokens.to(tl.int64)[:, None] * shape.padded_group + head[None, :]
    return tl.load(marks_ptr, mask=is_token[:, None], other=0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _reach(marks_ptr: tl.tensor, starts: tl.tensor, shape: Shape) -> tl.tensor:
    """Return of which tokens of a unit a mark reaches its head's start: bool [tokens]. Four are compared at a time."""
    padded: tl.constexpr = shape.padded_group
    words: tl.constexpr = (padded + 3) // 4
    in_words: tl.constexpr = min(padded, 4)
    of_word: tl.constexpr = 4 // in_words
    bits: tl.constexpr = 8 * in_words
    # A word's starts: of four heads, or those of all heads for several tokens.
    starts = tl.reshape(tl.minimum(tl.maximum(starts, 0), _HIGHEST), [words, in_words])
    start = tl.sum(starts << (8 * tl.arange(0, in_words))[None, :], 1)
    if of_word > 1:
        start |= start << bits
    if of_word > 2:
        start |= start << (2 * bits)
    count: tl.constexpr = shape.unit * padded // 4
    marks = tl.load(marks_ptr.to(tl.pointer_type(tl.int32)) + tl.arange(0, count))
    marks = tl.reshape(marks, [count // words, words])
    start = start[None, :]
    # The highest bit of each byte: as it is where just one of the two has it, or else where nothing is borrowed.
    unborrowed = (marks | _HIGH_BITS) - (start & _LOW_BITS)
    reach = ((marks & ~start) | (~(marks ^ start) & unborrowed)) & _HIGH_BITS
    if words > 1:
        is_high = tl.max((reach != 0).to(tl.int32), 1) > 0
    elif of_word > 1:
        own: tl.constexpr = 0x8080 if in_words == 2 else 0x80
        of_tokens = (reach >> (tl.arange(0, of_word) * bits)[None, :]) & own
        is_high = tl.reshape(of_tokens, [shape.unit]) != 0
    else:
        is_high = tl.reshape(reach, [shape.unit]) != 0
    return is_high
