"""Selecting by a threshold: which scores are the k largest, found without sorting.

Device functions for other kernels. Scores are turned into integers that compare as they do, and the threshold is
searched on a block of them that stays in registers. A round is a comparison and a sum over the block. It looks where
the scores' distribution, taken to be logistic, would have the threshold; every third round halves the integers that
are left, which bounds the rounds whatever the scores are. On scores as attention has them about ten rounds do.

A block holds up to 8,192 keys with ``num_warps`` 8, and 16,384 with 16 or more: one per page or cluster of 16 tokens,
that is a context of 256K.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

LOWEST: Final = tl.constexpr(-(2**31))
"""Below the key of every number; no score has it."""
HIGHEST: Final = tl.constexpr(2**31 - 1)
_KEY_OF_1E38: Final = tl.constexpr(0x7E967699)
# A packed weight: the weight in the low 18 bits, the count above.
_COUNT_SHIFT: Final = tl.constexpr(18)
_ONE: Final = tl.constexpr(2**18)
_WEIGHT_MASK: Final = tl.constexpr(2**18 - 1)
_COUNT_MASK: Final = tl.constexpr(2**14 - 1)


@triton.jit  # type: ignore[untyped-decorator]
def ordered(scores: tl.tensor) -> tl.tensor:
    """Return int32 keys that compare as float32 ``scores`` do: 0 and -0 alike, nan above everything."""
    # Adding zero makes -0 a 0.
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ HIGHEST, bits)


@triton.jit  # type: ignore[untyped-decorator]
def threshold(keys: tl.tensor, weights: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """Return the largest threshold t for which the weights of all keys >= t sum to at least ``wanted``.

    Args:
        keys: int32 [n] or [rows, n].
        weights: int32, same shape, not negative; 0 where there is no key. Their sum is below 2^31.
        wanted: int32, scalar or [rows]; at least 1.

    Returns:
        int32, as ``wanted``: one of the keys that have weight, or ``LOWEST`` where all weights together are less.
    """
    # Throughout: the weights at or above ``low`` suffice, those at or above ``high`` do not.
    low = tl.min(tl.where(weights > 0, keys, HIGHEST), axis=-1)
    high = tl.minimum(tl.max(tl.where(weights > 0, keys, LOWEST), axis=-1), HIGHEST - 1) + 1
    total = tl.sum(weights, axis=-1)
    at_low, at_high = total, total * 0
    enough = total >= wanted
    searching = enough & (at_low != wanted) & (low + 1 < high)
    halve = 2
    while _any(searching):
        guess = _interpolated_key(low, high, at_low, at_high, wanted, total)
        middle = (low & high) + ((low ^ high) >> 1)
        guess = tl.where(halve == 0, middle, tl.minimum(tl.maximum(guess, low + 1), high - 1))
        guess = tl.where(searching, guess, low)
        above = tl.sum(tl.where(keys >= _beside(guess, keys), weights, 0), axis=-1)
        suffices = above >= wanted
        at_low = tl.where(searching & suffices, above, at_low)
        low = tl.where(searching & suffices, guess, low)
        at_high = tl.where(searching & (suffices == 0), above, at_high)
        high = tl.where(searching & (suffices == 0), guess, high)
        searching = enough & (at_low != wanted) & (low + 1 < high)
        halve = tl.where(halve == 0, 2, halve - 1)
    reached = (keys >= _beside(low, keys)) & (weights > 0)
    least = tl.min(tl.where(reached, keys, HIGHEST), axis=-1)
    return tl.where(enough, least, LOWEST)


@triton.jit  # type: ignore[untyped-decorator]
def counted(weights: tl.tensor) -> tl.tensor:
    """Return int32 weights packed with a count of one."""
    return weights + _ONE


@triton.jit  # type: ignore[untyped-decorator]
def count_of(sums: tl.tensor) -> tl.tensor:
    """Return the number of the keys whose packed weights sum to ``sums``."""
    return (sums >> _COUNT_SHIFT) & _COUNT_MASK


@triton.jit  # type: ignore[untyped-decorator]
def weight_of(sums: tl.tensor) -> tl.tensor:
    """Return the weight of the keys whose packed weights sum to ``sums``."""
    return sums & _WEIGHT_MASK


@triton.jit  # type: ignore[untyped-decorator]
def leading(keys: tl.tensor, present: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Return which are the ``count`` largest keys; of those equal to the smallest of them, the first ones.

    Args:
        keys: int32 [n].
        present: bool [n]; which keys there are.
        count: int32 scalar; 0 for none. All that are present where it is more than they are.

    Returns:
        bool [n].
    """
    least = threshold(keys, present.to(tl.int32), tl.maximum(count, 1))
    above = present & (keys > least)
    equal = present & (keys == least)
    room = count - tl.sum(above.to(tl.int32), axis=0)
    return (above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= room))) & (count > 0)


@triton.jit  # type: ignore[untyped-decorator]
def _interpolated_key(
    low: tl.tensor, high: tl.tensor, at_low: tl.tensor, at_high: tl.tensor, wanted: tl.tensor, total: tl.tensor
) -> tl.tensor:
    """Return the key at which a logistic distribution would have ``wanted`` of ``total`` at or above it.

    Args:
        low: int32 scalar or [rows]; a key that has ``at_low`` at or above it.
        high: int32; a key that has ``at_high``, less than ``wanted``.
        at_low: a number, at least ``wanted``; amounts are as numbers of keys: half of one counts as none.
        at_high: a number.
        wanted: a number.
        total: a number.
    """
    at_low, at_high, at_wanted = _logit(at_low, total), _logit(at_high, total), _logit(wanted, total)
    low, high = score_of(low), score_of(high)
    return ordered(low + (high - low) * ((at_low - at_wanted) / (at_low - at_high)))


@triton.jit  # type: ignore[untyped-decorator]
def _logit(part: tl.tensor, total: tl.tensor) -> tl.tensor:
    return tl.log2(tl.maximum(part.to(tl.float32), 0.5) / tl.maximum((total - part).to(tl.float32), 0.5))


@triton.jit  # type: ignore[untyped-decorator]
def score_of(keys: tl.tensor) -> tl.tensor:
    """Return the float32 score that has a key of ``ordered``; of what is not finite ±1e38."""
    # Within ±1e38, so that the difference of two is finite.
    keys = tl.minimum(tl.maximum(keys, -1 - _KEY_OF_1E38), _KEY_OF_1E38)
    return tl.where(keys < 0, keys ^ HIGHEST, keys).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _beside(values: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """Return one value for each row of ``keys``, [rows, n], such that it broadcasts; a scalar for [n]."""
    if len(keys.shape) == 1:
        return values
    else:  # noqa: RET505 - Triton compiles only the branch taken, and needs to see that there is no other
        return values[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _any(flags: tl.tensor) -> tl.tensor:
    if len(flags.shape) == 0:
        return flags
    else:  # noqa: RET505 - as above
        return tl.max(flags.to(tl.int32), axis=0) > 0
