"""What of a query head's list of clusters is looked at, found without sorting (``selection``).

A program reads 8 bytes a cluster and holds them in registers. It costs what its sums over all of them cost, which wait
for each other: one for the scores' mean and deviation, one for the first guesses, one or two for guesses between them
(``search``), one for where to copy the few clusters left, and one over pairs of those.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.batch import COUNTS, Count
from winnow_kernels.indexes.kmeans import CLUSTER_SIZE
from winnow_kernels.kernel_arguments import Heads
from winnow_kernels.policies.tactic.gpu.contexts import is_idle, row_at
from winnow_kernels.policies.tactic.gpu.search import (
    BRACKETS,
    Bracket,
    Window,
    guessed_keys,
    guessed_window_keys,
    narrowed,
    narrowed_window,
    number_of,
    score_key_of,
    sums_above,
    unique_keys,
    within,
)
from winnow_kernels.policies.tactic.gpu.state import (
    HISTOGRAM,
    RANK_FAR_BEFORE,
    RANK_FAR_TOKENS,
    RANK_KNOWN,
    RANK_KNOWN_CLUSTERS,
    RANK_KNOWN_KEY,
    RANK_KNOWN_LAST,
    RANK_KNOWN_START,
    RANK_NEAR_BEFORE,
    RANK_NEAR_TOKENS,
    RANKS,
    Contexts,
    Ranked,
    Scored,
)
from winnow_kernels.policies.tactic.reference import EXACT_SHARE, LISTED_SHARE, WINDOW_CENTRES, WINDOW_CLUSTERS
from winnow_kernels.selection.gpu_threshold import HIGHEST, LOWEST, count_of, counted, ordered, packed_of, weight_of

CLUSTERS_OF_THREAD: Final = 16
"""Of how many clusters each thread holds key and size: of more, their comparisons find no room in registers."""

_EXACT_SHARE = tl.constexpr(EXACT_SHARE)
_LISTED_SHARE = tl.constexpr(LISTED_SHARE)
_NEAR, _FAR = (tl.constexpr(centre) for centre in WINDOW_CENTRES)
_WINDOW = tl.constexpr(WINDOW_CLUSTERS)
_SAMPLED = tl.constexpr(CLUSTER_SIZE)
_HISTOGRAM = tl.constexpr(HISTOGRAM)
_COUNTS = tl.constexpr(COUNTS)
_READ_BYTES = tl.constexpr(int(Count.READ_BYTES))
_GUESSES = tl.constexpr(16)
# Clusters of a thread, with as many warps as a launch gives.
_OF_THREAD = tl.constexpr(CLUSTERS_OF_THREAD)
# So many clusters of a bracket are compared in pairs.
_FEW = tl.constexpr(64)
# Four running counts in one number: of three brackets' clusters, less than 64 each, and of those surely known.
_COUNT_NEAR = tl.constexpr(64)
_COUNT_FAR = tl.constexpr(64**2)
_COUNT_KNOWN = tl.constexpr(64**3)


@triton.jit  # type: ignore[untyped-decorator]
def rank_kernel(  # noqa: PLR0915 - what is found on the way stays in registers
    contexts: Contexts,
    heads: Heads,
    counts_ptr: tl.tensor,
    scored: Scored,
    ranked: Ranked,
    member_bytes: tl.tensor,
    block: tl.constexpr,
    fewest: tl.constexpr,
) -> None:
    """Find one query head's clusters with exact weights and those of its windows, and count the keys to be sampled.

    For rows of more than ``fewest`` and at most ``block`` clusters.
    """
    head = tl.program_id(0)
    row = row_at(contexts, tl.program_id(1))
    tokens, count = row.clustered, row.clusters
    if is_idle(row) | (tokens == 0):
        return
    if (count <= fewest) | (count > block):
        return
    # One at a time in each thread: such that comparisons, running sums and scattered stores have one layout, and no
    # block has to change places. What is read here lies in the L2 cache.
    numbers = tl.max_contiguous(tl.arange(0, block), 1)
    present = numbers < count
    of_head = row.number.to(tl.int64) * (heads.kv_heads * heads.group) + head
    scores_ptr = scored.scores + of_head * scored.clusters
    ranks_ptr = ranked.ranks + of_head * RANKS
    windows_ptr = ranked.windows + of_head * (2 * _WINDOW)
    known_ptr = ranked.known + of_head * ranked.known_clusters
    searches_ptr = ranked.histogram + of_head * _HISTOGRAM
    scores = tl.load(scores_ptr + numbers, mask=present, other=0.0)
    of_kv_head = row.number.to(tl.int64) * heads.kv_heads + head // heads.group
    packed = tl.load(scored.sizes + of_kv_head * scored.clusters + numbers, mask=present, other=0)
    packed = tl.where(present, counted(packed), 0)
    # What is before a window is stored, and what is in it added to, by one thread each.
    tl.store(ranks_ptr + RANK_NEAR_TOKENS, 0)
    tl.store(ranks_ptr + RANK_FAR_TOKENS, 0)

    # Three places are sought at once: where the exact weights end, and both windows, all of each in one bracket. Half a
    # window is a whole number of clusters, so that it may be taken away after rounding.
    wanted = tl.ceil(tokens.to(tl.float64) * _EXACT_SHARE).to(tl.int32)
    listed = tl.maximum(tl.ceil(count.to(tl.float64) * _LISTED_SHARE).to(tl.int32), 1)
    near = tl.maximum(tl.ceil(count.to(tl.float64) * _NEAR).to(tl.int32) - _WINDOW // 2, 0)
    far = tl.minimum(tl.ceil(count.to(tl.float64) * _FAR).to(tl.int32) - _WINDOW // 2, count - _WINDOW)

    # The first guesses take the scores to be normal. One of them is added to the others' differences from it, so that
    # their squares keep their digits.
    guess = tl.arange(0, _GUESSES)
    some_score = tl.load(scores_ptr)
    off = tl.where(present, scores - some_score, 0.0)
    moment = tl.arange(0, 2)
    moments = tl.sum(tl.where(moment[:, None] == 0, off[None, :], off[None, :] * off[None, :]), axis=1)
    moments = moments / count.to(tl.float32)
    mean = tl.sum(tl.where(moment == 0, moments, 0.0), axis=0)
    deviation = tl.sqrt(tl.maximum(tl.sum(tl.where(moment == 1, moments, 0.0), axis=0) - mean * mean, 0.0))
    guesses = ordered(some_score + mean + deviation * _normal_places(guess))
    keys = tl.where(present, unique_keys(scores, numbers), LOWEST)
    sums = sums_above(keys, packed, guesses)
    _store_brackets(searches_ptr, guess, guesses, sums)
    _store_brackets(searches_ptr, _GUESSES + guess, guesses, sums)

    lowest, highest = count * 0 + LOWEST + 1, count * 0 + HIGHEST
    all_packed = packed_of(count, tokens).to(tl.uint32, bitcast=True)
    none = all_packed - all_packed
    has_known = (weight_of(sums) >= wanted) | (count_of(sums) >= listed)
    known = narrowed(Bracket(lowest, highest, all_packed, none), guesses, sums, has_known, has_known == 0)
    anywhere = Window(lowest, highest, lowest, highest, all_packed, none)
    in_near = narrowed_window(anywhere, near, guesses, sums)
    in_far = narrowed_window(anywhere, far, guesses, sums)
    target = tl.minimum(guess // 5, 2)
    offsets = tl.where(guess % 5 == 0, 2.5, 0.0) + tl.where(guess % 5 == 1, 1.0, 0.0)
    offsets -= tl.where(guess % 5 == 3, 1.0, 0.0) + tl.where(guess % 5 == 4, 2.5, 0.0)
    halves = guess % 5 == 2
    most = tl.maximum(within(known), within(in_near))
    while tl.maximum(most, within(in_far)) >= _FEW:
        guesses = guessed_keys(known, wanted + guess * 0, offsets, halves, True)
        of_near = guessed_window_keys(in_near, near, offsets, halves)
        of_far = guessed_window_keys(in_far, far, offsets, halves)
        guesses = tl.where(target == 0, guesses, tl.where(target == 1, of_near, of_far))
        sums = sums_above(keys, packed, guesses)
        _store_brackets(searches_ptr, _GUESSES + guess, guesses, sums)
        has_known = (weight_of(sums) >= wanted) | (count_of(sums) >= listed)
        known = narrowed(known, guesses, sums, has_known, has_known == 0)
        in_near = narrowed_window(in_near, near, guesses, sums)
        in_far = narrowed_window(in_far, far, guesses, sums)
        most = tl.maximum(within(known), within(in_near))

    # The few clusters of each bracket are copied out, and those that surely have exact weights are listed.
    is_known = keys >= known.high
    marks = tl.where(is_known, _COUNT_KNOWN, 0) + tl.where(_is_in(keys, known), 1, 0)
    marks += tl.where(_is_in(keys, in_near), _COUNT_NEAR, 0) + tl.where(_is_in(keys, in_far), _COUNT_FAR, 0)
    running = _running(marks)
    tl.store(known_ptr + running // _COUNT_KNOWN - 1, numbers, mask=is_known)
    copies_ptr = searches_ptr + 2 * BRACKETS
    _copy(copies_ptr, running % _COUNT_NEAR - 1, keys, packed, known)
    _copy(copies_ptr + 2 * _FEW, running // _COUNT_NEAR % _COUNT_NEAR - 1, keys, packed, in_near)
    _copy(copies_ptr + 4 * _FEW, running // _COUNT_FAR % _COUNT_NEAR - 1, keys, packed, in_far)
    tl.debug_barrier()

    # What comes before each of them is counted in pairs.
    sought, place = tl.arange(0, 4)[:, None], tl.arange(0, _FEW)[None, :]
    copied = _of_sought(sought, within(known), within(in_near), within(in_far))
    pairs_ptr = copies_ptr + sought * (2 * _FEW) + place
    keys = tl.load(pairs_ptr, mask=place < copied, other=LOWEST)
    packed = tl.load(pairs_ptr + _FEW, mask=place < copied, other=0)
    before = tl.sum(tl.where(keys[:, :, None] > keys[:, None, :], packed[:, :, None], 0), axis=1)

    # From here on in a row, such that all that is stored has one layout again.
    before = tl.reshape(before, (4 * _FEW,))
    copy = tl.arange(0, 4 * _FEW)
    sought, place = copy // _FEW, copy % _FEW
    is_copy = place < _of_sought(sought, within(known), within(in_near), within(in_far))
    copies_ptr += sought * (2 * _FEW) + place
    keys = tl.load(copies_ptr, mask=is_copy, other=LOWEST)
    sizes = weight_of(tl.load(copies_ptr + _FEW, mask=is_copy, other=0))
    above = tl.where(sought == 0, known.at_high, tl.where(sought == 1, in_near.at_high, in_far.at_high))
    before += above.to(tl.int32, bitcast=True)
    clusters_before, tokens_before, numbers = count_of(before), weight_of(before), number_of(keys)

    is_exact = is_copy & (sought == 0) & (tokens_before < wanted) & (clusters_before < listed)
    is_last = is_exact & ((tokens_before + sizes >= wanted) | (clusters_before + 1 >= listed))
    exact = tl.minimum(tokens_before + sizes, wanted)
    here = copy * 0
    tl.store(known_ptr + clusters_before, numbers, mask=is_exact)
    tl.store(ranks_ptr + RANK_KNOWN + here, exact, mask=is_last)
    tl.store(ranks_ptr + RANK_KNOWN_CLUSTERS + here, clusters_before + 1, mask=is_last)
    tl.store(ranks_ptr + RANK_KNOWN_KEY + here, score_key_of(keys), mask=is_last)
    tl.store(ranks_ptr + RANK_KNOWN_LAST + here, numbers, mask=is_last)
    tl.store(ranks_ptr + RANK_KNOWN_START + here, tokens_before, mask=is_last)

    window = clusters_before - tl.where(sought == 1, near, far)
    in_window = is_copy & (sought > 0) & (window >= 0) & (window < _WINDOW)
    tl.store(windows_ptr + tl.where(sought == 1, 0, _WINDOW) + window, numbers, mask=in_window)
    before_ptr = ranks_ptr + tl.where(sought == 1, RANK_NEAR_BEFORE, RANK_FAR_BEFORE)
    tl.store(before_ptr, tokens_before, mask=in_window & (window == 0))
    tokens_ptr = ranks_ptr + tl.where(sought == 1, RANK_NEAR_TOKENS, RANK_FAR_TOKENS)
    tl.atomic_add(tokens_ptr, sizes, mask=in_window, sem="relaxed", scope="cta")
    sampled = tl.where(is_last, exact, tl.minimum(sizes, _SAMPLED))
    read_ptr = counts_ptr + row.number * _COUNTS + _READ_BYTES + here
    tl.atomic_add(read_ptr, (sampled * member_bytes).to(tl.int64), mask=is_last | in_window, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _running(marks: tl.tensor) -> tl.tensor:
    """Return running sums of int32 ``marks``, in another order than theirs: first all of a thread's, then the next's.

    A sum over neighbours would go through all threads once for each number that a thread holds.
    """
    block: tl.constexpr = marks.shape[0]
    threads: tl.constexpr = max(128, block // _OF_THREAD)
    of_thread = tl.reshape(marks, (block // threads, threads))
    totals = tl.sum(of_thread, axis=0)
    before = tl.cumsum(totals, axis=0) - totals
    return tl.reshape(tl.cumsum(of_thread, axis=0) + before[None, :], (block,))


@triton.jit  # type: ignore[untyped-decorator]
def _of_sought(sought: tl.tensor, known: tl.tensor, near: tl.tensor, far: tl.tensor) -> tl.tensor:
    """Return the number that goes with each of the three places sought, and 0 for 3."""
    return tl.where(sought == 0, known, tl.where(sought == 1, near, tl.where(sought == 2, far, 0)))


@triton.jit  # type: ignore[untyped-decorator]
def _normal_places(guess: tl.tensor) -> tl.tensor:
    """Return float32 [16]: in deviations from the mean, where normal scores have what is sought, and what bounds them.

    No more than a fiftieth of any numbers lies above 7 deviations, no more than two fifths below -1.25.
    """
    places = tl.where(guess == 0, 7.0, tl.where(guess == 1, 3.5, tl.where(guess == 2, 2.6, 2.25)))
    places = tl.where(guess == 4, 2.05, tl.where(guess == 5, 1.85, tl.where(guess == 6, 1.6, places)))
    places = tl.where(guess == 7, 1.38, tl.where(guess == 8, 1.2, tl.where(guess == 9, 1.0, places)))
    places = tl.where(guess == 10, 0.5, tl.where(guess == 11, 0.1, tl.where(guess == 12, -0.15, places)))
    return tl.where(guess == 13, -0.35, tl.where(guess == 14, -0.6, tl.where(guess == 15, -1.25, places)))


@triton.jit  # type: ignore[untyped-decorator]
def _store_brackets(searches_ptr: tl.tensor, place: tl.tensor, guesses: tl.tensor, sums: tl.tensor) -> None:
    tl.store(searches_ptr + place, guesses)
    tl.store(searches_ptr + BRACKETS + place, sums.to(tl.int32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _is_in(keys: tl.tensor, bracket: Bracket | Window) -> tl.tensor:
    return (keys >= bracket.low) & (keys < bracket.high)


@triton.jit  # type: ignore[untyped-decorator]
def _copy(
    copies_ptr: tl.tensor, place: tl.tensor, keys: tl.tensor, packed: tl.tensor, bracket: Bracket | Window
) -> None:
    is_copy = _is_in(keys, bracket)
    tl.store(copies_ptr + place, keys, mask=is_copy)
    tl.store(copies_ptr + _FEW + place, packed, mask=is_copy)
