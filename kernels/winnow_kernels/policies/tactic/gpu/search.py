"""Finding places in a query head's list of clusters without sorting it (``selection``).

Score and number of a cluster make one integer, and no two are alike. A search holds a bracket of such keys, with the
number and the tokens of the clusters at or above each end, and narrows it by comparing all clusters with several
guesses at a time: what costs is not a comparison but the sum over a block, half a microsecond whatever is in it. The
guesses lie round the place that a straight line through the bracket's ends gives, as close as clusters scatter about
such a line. So a round leaves a tenth of a bracket or less, where halving would leave a half.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from winnow_kernels.kernel_arguments import Number
from winnow_kernels.policies.tactic.reference import IGNORED_BITS, WINDOW_CLUSTERS
from winnow_kernels.selection.gpu_threshold import HIGHEST, LOWEST, count_of, ordered, packed_of, score_of, weight_of

_NUMBERS = tl.constexpr(1 << IGNORED_BITS)
_COMPARED = tl.constexpr(16 * 2048)
_WINDOW = tl.constexpr(WINDOW_CLUSTERS)

BRACKETS = tl.constexpr(32)
"""Keys that ``rank_kernel`` leaves for ``fit_kernel``, with the clusters at or above each."""


class Bracket(NamedTuple):
    """Keys, int32, between which a place lies, and what is at or above them, packed: uint32."""

    low: Number
    high: Number
    at_low: Number
    at_high: Number


class Window(NamedTuple):
    """A bracket of a whole window, and within it the brackets of its ends: the last cluster's and the first's.

    Attributes:
        low: a key with all of the window at or above it.
        behind: the least key known with less than that: the last cluster is between ``low`` and it.
        front: the largest key known with some of the window at or above it.
        high: a key with nothing of the window at or above it: the first cluster is between ``front`` and it.
        at_low: what is at or above ``low``.
        at_high: what is at or above ``high``.
    """

    low: Number
    behind: Number
    front: Number
    high: Number
    at_low: Number
    at_high: Number


@triton.jit  # type: ignore[untyped-decorator]
def coarse(scores: tl.tensor) -> tl.tensor:
    """Return float32 scores in the steps in which clusters are ranked."""
    return (scores.to(tl.int32, bitcast=True) & -_NUMBERS).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def unique_keys(scores: tl.tensor, numbers: tl.tensor) -> tl.tensor:
    """Return int32 keys, all different: by ``coarse`` score, and of equal ones the first cluster has the largest.

    ``LOWEST`` is below all of them. Numbers are below 2^14.
    """
    return (ordered(scores) & -_NUMBERS) | (_NUMBERS - 1 - numbers)


@triton.jit  # type: ignore[untyped-decorator]
def number_of(keys: tl.tensor) -> tl.tensor:
    """Return the numbers of the clusters with these unique keys."""
    return _NUMBERS - 1 - (keys & (_NUMBERS - 1))


@triton.jit  # type: ignore[untyped-decorator]
def score_key_of(keys: tl.tensor) -> tl.tensor:
    """Return what ``ordered`` makes of the coarse scores of the clusters with these unique keys."""
    return tl.where(keys < 0, keys | (_NUMBERS - 1), keys & -_NUMBERS)


@triton.jit  # type: ignore[untyped-decorator]
def sums_above(keys: tl.tensor, packed: tl.tensor, guesses: tl.tensor) -> tl.tensor:
    """Return the packed clusters at or above each guess.

    Args:
        keys: int32 [n]; unique keys.
        packed: int32 [n]; ``counted(sizes)``, 0 where there is no cluster.
        guesses: int32 [m].

    Returns:
        uint32 [m]; of two sums the one of more clusters is the larger.
    """
    block: tl.constexpr = keys.shape[0]
    many: tl.constexpr = guesses.shape[0]
    if block * many > _COMPARED:
        # Half of them at a time: comparisons of all would not find room in registers.
        first, second = tl.split(tl.reshape(guesses, (many // 2, 2)))
        of_first = tl.sum(tl.where(keys[None, :] >= first[:, None], packed[None, :], 0), axis=1)
        of_second = tl.sum(tl.where(keys[None, :] >= second[:, None], packed[None, :], 0), axis=1)
        above = tl.reshape(tl.join(of_first, of_second), (many,))
    else:
        above = tl.sum(tl.where(keys[None, :] >= guesses[:, None], packed[None, :], 0), axis=1)
    return above.to(tl.uint32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def narrowed(bracket: Bracket, guesses: tl.tensor, sums: tl.tensor, suffices: tl.tensor, misses: tl.tensor) -> Bracket:
    """Return a bracket after some guesses.

    Args:
        bracket: before.
        guesses: int32 [m].
        sums: uint32 [m].
        suffices: bool [m]; whether what is sought lies all at or above the guess.
        misses: bool [m]; whether it lies all below.
    """
    low = tl.maximum(bracket.low, tl.max(tl.where(suffices, guesses, LOWEST), axis=0))
    high = tl.minimum(bracket.high, tl.min(tl.where(misses, guesses, HIGHEST), axis=0))
    at_low = tl.minimum(bracket.at_low, tl.min(tl.where(suffices, sums, bracket.at_low), axis=0))
    at_high = tl.maximum(bracket.at_high, tl.max(tl.where(misses, sums, bracket.at_high), axis=0))
    return Bracket(low, high, at_low, at_high)


@triton.jit  # type: ignore[untyped-decorator]
def narrowed_window(window: Window, first: tl.tensor, guesses: tl.tensor, sums: tl.tensor) -> Window:
    """Return what is known of a window of clusters after some guesses.

    The window's clusters are number ``first`` and the next, counted from the largest key. Each of its ends has a
    bracket of its own, which every guess in it narrows: whatever gaps are between scores, a search comes to an end.

    Args:
        window: before.
        first: int32 scalar.
        guesses: int32 [m].
        sums: uint32 [m].
    """
    holds, misses = count_of(sums) >= first + _WINDOW, count_of(sums) <= first
    whole = Bracket(window.low, window.high, window.at_low, window.at_high)
    whole = narrowed(whole, guesses, sums, holds, misses)
    behind = tl.minimum(window.behind, tl.min(tl.where(holds, HIGHEST, guesses), axis=0))
    front = tl.maximum(window.front, tl.max(tl.where(misses, LOWEST, guesses), axis=0))
    return Window(whole.low, behind, front, whole.high, whole.at_low, whole.at_high)


@triton.jit  # type: ignore[untyped-decorator]
def guessed_window_keys(window: Window, first: tl.tensor, offsets: tl.tensor, halves: tl.tensor) -> tl.tensor:
    """Return keys at which about a window's ends are: int32 [m]. See ``narrowed_window`` and ``guessed_keys``.

    Where ``offsets`` are positive they are within the bracket of its last cluster, else within that of its first; what
    halves does so with the wider of the two.
    """
    low, behind, front, high = window.low, window.behind, window.front, window.high
    end = first + _WINDOW
    # Half of each, such that the differences are within 32 bits.
    is_last_wider = (behind >> 1) - (low >> 1) > (high >> 1) - (front >> 1)
    is_last = (offsets > 0) | (halves & is_last_wider)
    # A key within the window has between ``first`` and ``end`` clusters at or above it.
    at_behind = tl.where(behind == high, window.at_high, packed_of(first, 0).to(tl.uint32, bitcast=True))
    at_front = tl.where(front == low, window.at_low, packed_of(end, 0).to(tl.uint32, bitcast=True))
    of_end = Bracket(
        tl.where(is_last, low, front),
        tl.where(is_last, behind, high),
        tl.where(is_last, window.at_low, at_front),
        tl.where(is_last, at_behind, window.at_high),
    )
    return guessed_keys(of_end, tl.where(is_last, end, first), offsets, halves, False)


@triton.jit  # type: ignore[untyped-decorator]
def within(bracket: Bracket | Window) -> tl.tensor:
    """Return how many clusters a bracket holds, int32."""
    return (count_of(bracket.at_low) - count_of(bracket.at_high)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def guessed_keys(
    bracket: Bracket, wanted: tl.tensor, offsets: tl.tensor, halves: tl.tensor, by_weight: tl.constexpr
) -> tl.tensor:
    """Return keys within brackets, if there are any, at which about ``wanted`` is at or above: int32 [m].

    Args:
        bracket: of scalars or [m].
        wanted: int32 [m]; tokens if ``by_weight``, else clusters.
        offsets: float32 [m]; by how much more to guess, in units by which clusters scatter about a straight line.
        halves: bool [m]; whether to guess the middle of low and high instead: that bounds the rounds, whatever the
            scores.
        by_weight: see ``wanted``.
    """
    low, high = bracket.low, bracket.high
    low_amount, high_amount = count_of(bracket.at_low), count_of(bracket.at_high)
    if by_weight:
        low_amount, high_amount = weight_of(bracket.at_low), weight_of(bracket.at_high)
    # n clusters scatter by √n / 2, and some more as their density changes: in shares of them.
    scatter = 0.5 * tl.rsqrt(tl.maximum(within(bracket), 1).to(tl.float32)) + 0.02
    of_one = 1.0 / tl.maximum((low_amount - high_amount).to(tl.float32), 1.0)
    share = (low_amount.to(tl.int32) - wanted).to(tl.float32) * of_one - offsets * scatter
    share = tl.minimum(tl.maximum(share, 0.02), 0.98)
    low_score, high_score = score_of(low), score_of(high)
    guess = ordered(low_score + (high_score - low_score) * share)
    guess = tl.where(halves, (low & high) + ((low ^ high) >> 1), guess)
    return tl.minimum(tl.maximum(guess, low + 1), high - 1)
