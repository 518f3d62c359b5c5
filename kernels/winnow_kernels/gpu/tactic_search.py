"""Finding places in a query head's list of clusters without sorting it (``winnow_kernels.gpu.tactic``).

Score and number of a cluster make one integer, and no two are alike. A search holds a bracket of such keys, with the
number and the tokens of the clusters at or above each end, and narrows it by comparing clusters with several guesses at
a time. The guesses lie round the place that a straight line through the bracket's ends gives, as close as clusters
scatter about such a line. So a round leaves a tenth of a bracket or less, where halving would leave a half.

A round over clusters in registers costs two instructions a comparison, and as much again to add up over threads and to
narrow. Of more clusters than find room there, those in a bracket are copied together first; to go through all of them
takes some twenty instructions a cluster.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.gpu.tactic_state import HELD_CLUSTERS, SEARCHED
from winnow_kernels.gpu.threshold import HIGHEST, LOWEST, count_of, counted, ordered, score_of, weight_of
from winnow_kernels.tactic import IGNORED_BITS

_NUMBERS = tl.constexpr(1 << IGNORED_BITS)
# Two counts in one number: above these bits those of a second kind.
_COUNT_BITS = tl.constexpr(15)
_COUNT_MASK = tl.constexpr((1 << 15) - 1)
_ONE_ABOVE = tl.constexpr(1 << 15)

BRACKETS = tl.constexpr(16)
"""Keys that ``rank_kernel`` leaves for ``fit_kernel``, with the clusters at or above each."""
HELD: Final = tl.constexpr(HELD_CLUSTERS)
"""Clusters that a program holds in registers while it searches among them."""
LISTS: Final = tl.constexpr(SEARCHED - 2 * HELD_CLUSTERS)
"""Where in a query head's scratch they are, if they are copies."""
CHUNK: Final = tl.constexpr(1024)
"""Clusters that a program looks at together when it goes through all of them."""


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
def one_by_one(many: tl.constexpr) -> tl.tensor:
    """Return int32 [many], 0 and what follows, neighbouring ones in neighbouring threads.

    So comparisons, running sums and scattered stores have one layout, and no block has to change places.
    """
    return tl.max_contiguous(tl.arange(0, many), 1)


@triton.jit  # type: ignore[untyped-decorator]
def clusters_at(
    scores_ptr: tl.tensor, sizes_ptr: tl.tensor, numbers: tl.tensor, present: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return unique keys and packed sizes of clusters; ``LOWEST`` and 0 where none is ``present``."""
    scores = tl.load(scores_ptr + numbers, mask=present, other=0.0)
    sizes = tl.load(sizes_ptr + numbers, mask=present, other=0)
    return tl.where(present, unique_keys(scores, numbers), LOWEST), tl.where(present, counted(sizes), 0)


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
    above = tl.sum(tl.where(keys[None, :] >= guesses[:, None], packed[None, :], 0), axis=1)
    return above.to(tl.uint32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def stored_sums_above(
    scores_ptr: tl.tensor, sizes_ptr: tl.tensor, count: tl.tensor, guesses: tl.tensor, chunk: tl.constexpr
) -> tl.tensor:
    """``sums_above`` of ``count`` clusters in memory, so many of them at a time."""
    many: tl.constexpr = guesses.shape[0]
    above = tl.zeros((many, chunk), tl.int32)
    for begin in range(0, count, chunk):
        numbers = begin + one_by_one(chunk)
        keys, packed = clusters_at(scores_ptr, sizes_ptr, numbers, numbers < count)
        above += tl.where(keys[None, :] >= guesses[:, None], packed[None, :], 0)
    return tl.sum(above, axis=1).to(tl.uint32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def copy_between(
    scores_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    low2: tl.tensor,
    high2: tl.tensor,
    low3: tl.tensor,
    high3: tl.tensor,
    copies_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    above: tl.tensor,
    chunk: tl.constexpr,
) -> tl.tensor:
    """Copy the clusters in any of three brackets, at most ``HELD`` in all, in no order that matters.

    Args:
        scores_ptr: float32 [count]; scores of all clusters.
        sizes_ptr: int32 [count]; their sizes.
        count: int32 scalar.
        low: int32 scalar; a key.
        high: int32 scalar; a key: a bracket goes up to below here.
        low2: of another bracket.
        high2: likewise.
        low3: of a third one.
        high3: likewise.
        copies_ptr: int32 [2, HELD]; where keys and packed sizes go.
        numbers_ptr: where the numbers of clusters go whose keys are at or above the next.
        above: int32 scalar; a key.
        chunk: clusters that are looked at together.

    Returns:
        How many were copied, int32.
    """
    # Each lane goes through its clusters twice: to know where it may write, and to write.
    found = tl.zeros((chunk,), tl.int32)
    for begin in range(0, count, chunk):
        numbers = begin + one_by_one(chunk)
        keys, _ = clusters_at(scores_ptr, sizes_ptr, numbers, numbers < count)
        is_inside = ((keys >= low) & (keys < high)) | ((keys >= low2) & (keys < high2))
        is_inside = is_inside | ((keys >= low3) & (keys < high3))
        found += is_inside.to(tl.int32) + tl.where(keys >= above, _ONE_ABOVE, 0)
    places = tl.cumsum(found, axis=0) - found
    for begin in range(0, count, chunk):
        numbers = begin + one_by_one(chunk)
        keys, packed = clusters_at(scores_ptr, sizes_ptr, numbers, numbers < count)
        is_inside = ((keys >= low) & (keys < high)) | ((keys >= low2) & (keys < high2))
        is_inside = is_inside | ((keys >= low3) & (keys < high3))
        tl.store(copies_ptr + (places & _COUNT_MASK), keys, mask=is_inside)
        tl.store(copies_ptr + HELD + (places & _COUNT_MASK), packed, mask=is_inside)
        tl.store(numbers_ptr + (places >> _COUNT_BITS), numbers, mask=keys >= above)
        places += is_inside.to(tl.int32) + tl.where(keys >= above, _ONE_ABOVE, 0)
    tl.debug_barrier()
    return tl.sum(found, axis=0) & _COUNT_MASK


@triton.jit  # type: ignore[untyped-decorator]
def copies_at(copies_ptr: tl.tensor, copied: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the keys and packed sizes, int32 [HELD], that ``copy_between`` has copied."""
    place = one_by_one(HELD)
    keys = tl.load(copies_ptr + place, mask=place < copied, other=LOWEST)
    return keys, tl.load(copies_ptr + HELD + place, mask=place < copied, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def narrowed(
    low: tl.tensor,
    high: tl.tensor,
    at_low: tl.tensor,
    at_high: tl.tensor,
    guesses: tl.tensor,
    sums: tl.tensor,
    suffices: tl.tensor,
    misses: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return a bracket, low and high and what is at or above them, after some guesses.

    Args:
        low: int32 scalar.
        high: int32 scalar.
        at_low: uint32 scalar.
        at_high: uint32 scalar.
        guesses: int32 [m].
        sums: uint32 [m].
        suffices: bool [m]; whether what is sought lies all at or above the guess.
        misses: bool [m]; whether it lies all below.
    """
    low = tl.maximum(low, tl.max(tl.where(suffices, guesses, LOWEST), axis=0))
    high = tl.minimum(high, tl.min(tl.where(misses, guesses, HIGHEST), axis=0))
    at_low = tl.minimum(at_low, tl.min(tl.where(suffices, sums, at_low), axis=0))
    at_high = tl.maximum(at_high, tl.max(tl.where(misses, sums, at_high), axis=0))
    return low, high, at_low, at_high


@triton.jit  # type: ignore[untyped-decorator]
def within(at_low: tl.tensor, at_high: tl.tensor) -> tl.tensor:
    """Return how many clusters a bracket holds, int32."""
    return (count_of(at_low) - count_of(at_high)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def guessed_keys(
    low: tl.tensor,
    high: tl.tensor,
    at_low: tl.tensor,
    at_high: tl.tensor,
    wanted: tl.tensor,
    offsets: tl.tensor,
    halves: tl.tensor,
    by_weight: tl.constexpr,
) -> tl.tensor:
    """Return keys above low and below high, if there are any, at which about ``wanted`` is at or above: int32 [m].

    Args:
        low: int32 scalar.
        high: int32 scalar.
        at_low: uint32 scalar.
        at_high: uint32 scalar.
        wanted: int32 [m]; tokens if ``by_weight``, else clusters.
        offsets: float32 [m]; by how much more to guess, in units by which clusters scatter about a straight line.
        halves: bool [m]; whether to guess the middle of low and high instead: that bounds the rounds, whatever the
            scores.
        by_weight: see ``wanted``.
    """
    low_amount, high_amount = count_of(at_low), count_of(at_high)
    if by_weight:
        low_amount, high_amount = weight_of(at_low), weight_of(at_high)
    # n clusters scatter by √n / 2, and some more as their density changes: in shares of them.
    scatter = 0.5 * tl.rsqrt(tl.maximum(within(at_low, at_high), 1).to(tl.float32)) + 0.02
    of_one = 1.0 / tl.maximum((low_amount - high_amount).to(tl.float32), 1.0)
    share = (low_amount.to(tl.int32) - wanted).to(tl.float32) * of_one - offsets * scatter
    share = tl.minimum(tl.maximum(share, 0.02), 0.98)
    low_score, high_score = score_of(low), score_of(high)
    guess = ordered(low_score + (high_score - low_score) * share)
    guess = tl.where(halves, (low & high) + ((low ^ high) >> 1), guess)
    return tl.minimum(tl.maximum(guess, low + 1), high - 1)
