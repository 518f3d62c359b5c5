"""What of a query head's list of clusters is looked at, found without sorting (``winnow_kernels.gpu.tactic``).

Three places are sought at once: where the exact weights end, and both windows. A program searches among so many
clusters as it can hold (``winnow_kernels.gpu.tactic_search``). Of a row that has more these are a sample at first,
which gives brackets that hold what is sought but for one head in some thousands. A pass over all clusters says whether
they do, and exactly what lies above them; where one does not, passes go on until all do. Then the clusters inside the
brackets are copied together, and the search ends among those.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.gpu.batch import COUNTS, Count
from winnow_kernels.gpu.tactic_search import (
    BRACKETS,
    CHUNK,
    HELD,
    LISTS,
    copies_at,
    copy_between,
    guessed_keys,
    narrowed,
    number_of,
    one_by_one,
    score_key_of,
    stored_sums_above,
    sums_above,
    unique_keys,
    within,
)
from winnow_kernels.gpu.tactic_state import (
    HELD_CLUSTERS,
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
    SEARCHED,
    is_idle,
)
from winnow_kernels.gpu.threshold import HIGHEST, LOWEST, count_of, counted, ordered, packed_of, weight_of
from winnow_kernels.kmeans import CLUSTER_SIZE
from winnow_kernels.tactic import EXACT_SHARE, LISTED_SHARE, WINDOW_CENTRES, WINDOW_CLUSTERS

WARPS: Final = 4
"""Of a program whose clusters are all held; with more, what all threads compute alike costs more than they save."""
MORE_WARPS: Final = 8
"""Of a program that goes through more of them, several times."""

_THREADS, _MORE_THREADS = tl.constexpr(32 * WARPS), tl.constexpr(32 * MORE_WARPS)
_EXACT_SHARE = tl.constexpr(EXACT_SHARE)
_LISTED_SHARE = tl.constexpr(LISTED_SHARE)
_NEAR, _FAR = (tl.constexpr(centre) for centre in WINDOW_CENTRES)
_WINDOW = tl.constexpr(WINDOW_CLUSTERS)
_SAMPLED = tl.constexpr(CLUSTER_SIZE)
_SEARCHED = tl.constexpr(SEARCHED)
_COUNTS = tl.constexpr(COUNTS)
_READ_BYTES = tl.constexpr(int(Count.READ_BYTES))
_GUESSES = tl.constexpr(16)
# Two ends of three brackets, and two more.
_ENDS = tl.constexpr(8)
# Rounds that the search in a sample takes.
_SAMPLE_ROUNDS = tl.constexpr(2)
# Deviations by which a sample may mislead.
_DEVIATIONS = tl.constexpr(4.0)
# So many clusters of a bracket are compared in pairs.
_FEW = tl.constexpr(1 << 6)
# Four running counts in one number: of three brackets' clusters, less than 64 each, and of those surely known.
_NEAR_BITS, _FAR_BITS, _KNOWN_BITS = tl.constexpr(6), tl.constexpr(12), tl.constexpr(18)
_ONE_NEAR, _ONE_FAR, _ONE_KNOWN = tl.constexpr(1 << 6), tl.constexpr(1 << 12), tl.constexpr(1 << 18)


def rank_warps(block: int) -> int:
    """Return the warps of a program for rows of up to ``block`` clusters."""
    return WARPS if block <= HELD_CLUSTERS else MORE_WARPS


@triton.jit  # type: ignore[untyped-decorator]
def rank_kernel(  # noqa: PLR0915 - what is found on the way stays in registers
    scores_ptr: tl.tensor,
    cluster_sizes_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    clustered_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    caps_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    known_ptr: tl.tensor,
    windows_ptr: tl.tensor,
    searches_ptr: tl.tensor,
    member_bytes: tl.tensor,
    clusters: tl.tensor,
    known_clusters: tl.tensor,
    query_heads: tl.tensor,
    group: tl.constexpr,
    span: tl.constexpr,
    of_span: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Find one query head's clusters with exact weights and those of its windows, and count the keys to be sampled."""
    head, row = tl.program_id(0), tl.program_id(1)
    share, cap = tl.load(shares_ptr + row), tl.load(caps_ptr + row)
    length, tokens = tl.load(lengths_ptr + row), tl.load(clustered_ptr + row)
    if is_idle(share, length, tokens, cap) | (tokens == 0):
        return
    count = tokens // span * of_span
    of_head = row.to(tl.int64) * query_heads + head
    of_kv_head = row.to(tl.int64) * (query_heads // group) + head // group
    scores_ptr += of_head * clusters
    cluster_sizes_ptr += of_kv_head * clusters
    ranks_ptr += of_head * RANKS
    windows_ptr += of_head * (2 * _WINDOW)
    known_ptr += of_head * known_clusters
    searches_ptr += of_head * _SEARCHED
    held: tl.constexpr = min(block, HELD)
    numbers = one_by_one(held)
    if block > held:
        # Of many clusters eight in a row, a sector of memory, from places equally far apart.
        sampled = numbers // 8 * (count // 8) // (held // 8) * 8 + numbers % 8
        numbers = tl.max_contiguous(tl.where(count > held, sampled, numbers), 1)
    present = numbers < count
    scores = tl.load(scores_ptr + numbers, mask=present, other=0.0)
    packed = tl.load(cluster_sizes_ptr + numbers, mask=present, other=0)
    some_score = tl.load(scores_ptr)
    packed = tl.where(present, counted(packed), 0)
    keys = tl.where(present, unique_keys(scores, numbers), LOWEST)
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
    off = tl.where(present, scores - some_score, 0.0)
    moment = tl.arange(0, 2)
    moments = tl.sum(tl.where(moment[:, None] == 0, off[None, :], off[None, :] * off[None, :]), axis=1)
    moments = moments / tl.minimum(count, held).to(tl.float32)
    mean = tl.sum(tl.where(moment == 0, moments, 0.0), axis=0)
    deviation = tl.sqrt(tl.maximum(tl.sum(tl.where(moment == 1, moments, 0.0), axis=0) - mean * mean, 0.0))
    first_guesses = ordered(some_score + mean + deviation * _normal_places(guess))
    first_sums = sums_above(keys, packed, first_guesses)

    all_packed = packed_of(count, tokens).to(tl.uint32, bitcast=True)
    none = all_packed - all_packed
    lowest, highest = count * 0 + (LOWEST + 1), count * 0 + HIGHEST
    # Clusters at or above this key have been listed, so many.
    known_first, certain = highest, count * 0
    # What is above the clusters held, which are all, or those of the brackets.
    base, near_base, far_base = none, none, none
    if block > held:
        if count > held:
            # fmt: off
            (
                low, high, at_low, at_high, near_low, near_high, at_near_low, at_near_high,
                far_low, far_high, at_far_low, at_far_high,
            ) = _search_all(
                scores_ptr, cluster_sizes_ptr, count, tokens, keys, packed, first_guesses, first_sums,
                wanted, listed, near, far, searches_ptr,
            )
            known_first, certain = high, count_of(at_high).to(tl.int32)
            copied = copy_between(
                scores_ptr, cluster_sizes_ptr, count, low, high, near_low, near_high, far_low, far_high,
                searches_ptr + LISTS, known_ptr, high, CHUNK,
            )
            # fmt: on
            keys, packed = copies_at(searches_ptr + LISTS, copied)
            place = tl.arange(0, 4)
            above = sums_above(keys, packed, tl.where(place == 0, high, tl.where(place == 1, near_high, far_high)))
            base = at_high - tl.max(tl.where(place == 0, above, 0), axis=0)
            near_base = at_near_high - tl.max(tl.where(place == 1, above, 0), axis=0)
            far_base = at_far_high - tl.max(tl.where(place == 2, above, 0), axis=0)
        else:
            _store_brackets(searches_ptr, guess, first_guesses, first_sums)
            low, high, at_low, at_high = _narrowed_known(
                lowest, highest, all_packed, none, first_guesses, first_sums, wanted, wanted - 1, listed, listed - 1
            )
            near_low, near_high, at_near_low, at_near_high = _narrowed_window(
                lowest, highest, all_packed, none, first_guesses, first_sums, near + _WINDOW, near
            )
            far_low, far_high, at_far_low, at_far_high = _narrowed_window(
                lowest, highest, all_packed, none, first_guesses, first_sums, far + _WINDOW, far
            )
    else:
        _store_brackets(searches_ptr, guess, first_guesses, first_sums)
        low, high, at_low, at_high = _narrowed_known(
            lowest, highest, all_packed, none, first_guesses, first_sums, wanted, wanted - 1, listed, listed - 1
        )
        near_low, near_high, at_near_low, at_near_high = _narrowed_window(
            lowest, highest, all_packed, none, first_guesses, first_sums, near + _WINDOW, near
        )
        far_low, far_high, at_far_low, at_far_high = _narrowed_window(
            lowest, highest, all_packed, none, first_guesses, first_sums, far + _WINDOW, far
        )
    target = tl.minimum(guess // 5, 2)
    offsets = tl.where(guess % 5 == 0, 2.5, 0.0) + tl.where(guess % 5 == 1, 1.0, 0.0)
    offsets -= tl.where(guess % 5 == 3, 1.0, 0.0) + tl.where(guess % 5 == 4, 2.5, 0.0)
    halves = guess % 5 == 2
    behind = tl.where(offsets > 0, _WINDOW, 0)
    most = tl.maximum(within(at_low, at_high), within(at_near_low, at_near_high))
    while tl.maximum(most, within(at_far_low, at_far_high)) >= _FEW:
        guesses = guessed_keys(low, high, at_low, at_high, wanted + guess * 0, offsets, halves, True)
        of_near = guessed_keys(near_low, near_high, at_near_low, at_near_high, near + behind, offsets, halves, False)
        of_far = guessed_keys(far_low, far_high, at_far_low, at_far_high, far + behind, offsets, halves, False)
        guesses = tl.where(target == 0, guesses, tl.where(target == 1, of_near, of_far))
        sums = sums_above(keys, packed, guesses)
        # Outside a bracket what is added to its base may not be all that there is; there it narrows nothing.
        low, high, at_low, at_high = _narrowed_known(
            low, high, at_low, at_high, guesses, base + sums, wanted, wanted - 1, listed, listed - 1
        )
        near_low, near_high, at_near_low, at_near_high = _narrowed_window(
            near_low, near_high, at_near_low, at_near_high, guesses, near_base + sums, near + _WINDOW, near
        )
        far_low, far_high, at_far_low, at_far_high = _narrowed_window(
            far_low, far_high, at_far_low, at_far_high, guesses, far_base + sums, far + _WINDOW, far
        )
        most = tl.maximum(within(at_low, at_high), within(at_near_low, at_near_high))

    # The few clusters of each bracket are copied out, and those that surely have exact weights are listed.
    numbers = number_of(keys)
    is_known = (keys >= high) & (keys < known_first)
    is_candidate = (keys >= low) & (keys < high)
    is_near = (keys >= near_low) & (keys < near_high)
    is_far = (keys >= far_low) & (keys < far_high)
    marks = tl.where(is_known, _ONE_KNOWN, 0) + tl.where(is_candidate, 1, 0)
    marks += tl.where(is_near, _ONE_NEAR, 0) + tl.where(is_far, _ONE_FAR, 0)
    running = _running(marks, _MORE_THREADS if block > held else _THREADS)
    tl.store(known_ptr + certain + (running >> _KNOWN_BITS) - 1, numbers, mask=is_known)
    copies_ptr = searches_ptr + 2 * BRACKETS
    _copy(copies_ptr, running, keys, packed, is_candidate)
    _copy(copies_ptr + 2 * _FEW, running >> _NEAR_BITS, keys, packed, is_near)
    _copy(copies_ptr + 4 * _FEW, running >> _FAR_BITS, keys, packed, is_far)
    tl.debug_barrier()

    # What comes before each of them is counted in pairs.
    sought, place = tl.arange(0, 4)[:, None], tl.arange(0, _FEW)[None, :]
    copied = _of_sought(
        sought, within(at_low, at_high), within(at_near_low, at_near_high), within(at_far_low, at_far_high)
    )
    pairs_ptr = copies_ptr + sought * (2 * _FEW) + place
    keys = tl.load(pairs_ptr, mask=place < copied, other=LOWEST)
    packed = tl.load(pairs_ptr + _FEW, mask=place < copied, other=0)
    before = tl.sum(tl.where(keys[:, :, None] > keys[:, None, :], packed[:, :, None], 0), axis=1)

    # From here on in a row, such that all that is stored has one layout again.
    before = tl.reshape(before, (4 * _FEW,))
    copy = tl.arange(0, 4 * _FEW)
    sought, place = copy // _FEW, copy % _FEW
    copied = _of_sought(
        sought, within(at_low, at_high), within(at_near_low, at_near_high), within(at_far_low, at_far_high)
    )
    is_copy = place < copied
    copies_ptr += sought * (2 * _FEW) + place
    keys = tl.load(copies_ptr, mask=is_copy, other=LOWEST)
    sizes = weight_of(tl.load(copies_ptr + _FEW, mask=is_copy, other=0))
    before += tl.where(sought == 0, at_high, tl.where(sought == 1, at_near_high, at_far_high)).to(
        tl.int32, bitcast=True
    )
    clusters_before, tokens_before, numbers = count_of(before), weight_of(before), number_of(keys)

    is_exact = is_copy & (sought == 0) & (tokens_before < wanted) & (clusters_before < listed)
    is_last = is_exact & ((tokens_before + sizes >= wanted) | (clusters_before + 1 >= listed))
    known = tl.minimum(tokens_before + sizes, wanted)
    here = copy * 0
    tl.store(known_ptr + clusters_before, numbers, mask=is_exact)
    tl.store(ranks_ptr + RANK_KNOWN + here, known, mask=is_last)
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
    sampled = tl.where(is_last, known, tl.minimum(sizes, _SAMPLED))
    read_ptr = counts_ptr + row * _COUNTS + _READ_BYTES + here
    tl.atomic_add(read_ptr, (sampled * member_bytes).to(tl.int64), mask=is_last | in_window, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _running(marks: tl.tensor, threads: tl.constexpr) -> tl.tensor:
    """Return running sums of int32 ``marks``, in another order than theirs: first all of a thread's, then the next's.

    A sum over neighbours would go through all threads once for each number that a thread holds.
    """
    block: tl.constexpr = marks.shape[0]
    of_thread = tl.reshape(marks, (block // threads, threads))
    totals = tl.sum(of_thread, axis=0)
    before = tl.cumsum(totals, axis=0) - totals
    return tl.reshape(tl.cumsum(of_thread, axis=0) + before[None, :], (block,))


@triton.jit  # type: ignore[untyped-decorator]
def _of_sought(sought: tl.tensor, known: tl.tensor, near: tl.tensor, far: tl.tensor) -> tl.tensor:
    """Return the number that goes with each of the three places sought, and 0 for 3."""
    return tl.where(sought == 0, known, tl.where(sought == 1, near, tl.where(sought == 2, far, 0)))


@triton.jit  # type: ignore[untyped-decorator]
def _search_all(  # noqa: PLR0915 - what is found on the way stays in registers
    scores_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    count: tl.tensor,
    tokens: tl.tensor,
    keys: tl.tensor,
    packed: tl.tensor,
    first_guesses: tl.tensor,
    first_sums: tl.tensor,
    wanted: tl.tensor,
    listed: tl.tensor,
    near: tl.tensor,
    far: tl.tensor,
    searches_ptr: tl.tensor,
) -> tuple[
    tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor,
    tl.tensor, tl.tensor,
]:  # fmt: skip
    """Find brackets of ``count`` clusters, no more in all than are held, with the help of a sample that is held.

    Args:
        scores_ptr: the query head's scores.
        sizes_ptr: the clusters' sizes.
        count: how many.
        tokens: in all of them.
        keys: int32 [HELD]; of the sample.
        packed: int32 [HELD]; sizes of the sample.
        first_guesses: int32 [_GUESSES].
        first_sums: uint32 [_GUESSES]; what of the sample lies at or above these.
        wanted: tokens with exact weights,
        listed: in at most so many clusters.
        near: clusters before the near window.
        far: before the far one.
        searches_ptr: where brackets are left for ``fit_kernel``.

    Returns:
        Of each of the three places: low, high, and what of all clusters is at or above them.
    """
    # Of the sample proportionally as much, and by as much more or less as it may mislead.
    part = HELD / count.to(tl.float32)
    rest = HELD * (1.0 - part)
    off_known = _DEVIATIONS * tl.sqrt(_EXACT_SHARE * (1.0 - part) * part * tokens.to(tl.float32) * _SAMPLED)
    off_listed = _DEVIATIONS * tl.sqrt(_LISTED_SHARE * (1.0 - _LISTED_SHARE) * rest)
    off_near = _DEVIATIONS * tl.sqrt(_NEAR * (1.0 - _NEAR) * rest)
    off_far = _DEVIATIONS * tl.sqrt(_FAR * (1.0 - _FAR) * rest)
    most, least = _scaled(wanted, part, off_known)
    most_listed, least_listed = _scaled(listed, part, off_listed)
    most_near, least_near = _scaled(near, part, off_near)
    most_far, least_far = _scaled(far, part, off_far)

    all_sampled = tl.sum(packed, axis=0).to(tl.uint32, bitcast=True)
    none = all_sampled - all_sampled
    lowest, highest = count * 0 + (LOWEST + 1), count * 0 + HIGHEST
    low, high, at_low, at_high = _narrowed_known(
        lowest, highest, all_sampled, none, first_guesses, first_sums, least, most, least_listed, most_listed
    )
    near_low, near_high, at_near_low, at_near_high = _narrowed_window(
        lowest, highest, all_sampled, none, first_guesses, first_sums, least_near, most_near
    )
    far_low, far_high, at_far_low, at_far_high = _narrowed_window(
        lowest, highest, all_sampled, none, first_guesses, first_sums, least_far, most_far
    )
    # Either end is sought by itself, from both sides.
    guess = tl.arange(0, _GUESSES)
    target, end = tl.minimum(guess // 5, 2), guess % 5
    offsets = tl.where(end % 3 == 0, 0.7, -0.7)
    is_least, halves = end < 2, end == 2
    for _ in range(_SAMPLE_ROUNDS):
        guesses = guessed_keys(low, high, at_low, at_high, tl.where(is_least, least, most), offsets, halves, True)
        of_near = guessed_keys(
            near_low, near_high, at_near_low, at_near_high, tl.where(is_least, least_near, most_near), offsets, halves,
            False,
        )  # fmt: skip
        of_far = guessed_keys(
            far_low, far_high, at_far_low, at_far_high, tl.where(is_least, least_far, most_far), offsets, halves, False
        )
        guesses = tl.where(target == 0, guesses, tl.where(target == 1, of_near, of_far))
        sums = sums_above(keys, packed, guesses)
        low, high, at_low, at_high = _narrowed_known(
            low, high, at_low, at_high, guesses, sums, least, most, least_listed, most_listed
        )
        near_low, near_high, at_near_low, at_near_high = _narrowed_window(
            near_low, near_high, at_near_low, at_near_high, guesses, sums, least_near, most_near
        )
        far_low, far_high, at_far_low, at_far_high = _narrowed_window(
            far_low, far_high, at_far_low, at_far_high, guesses, sums, least_far, most_far
        )

    # Of all clusters. Two guesses more are for the fit: between the exact weights and the near window, and the windows.
    guess = tl.arange(0, _ENDS)
    between = tl.max(tl.where(tl.arange(0, _GUESSES) == 6, first_guesses, LOWEST), axis=0)
    beyond = tl.max(tl.where(tl.arange(0, _GUESSES) == 10, first_guesses, LOWEST), axis=0)
    ends = tl.where(guess == 0, low, tl.where(guess == 1, high, tl.where(guess == 2, near_low, near_high)))
    ends = tl.where(guess == 4, far_low, tl.where(guess == 5, far_high, ends))
    ends = tl.where(guess == 6, between, tl.where(guess == 7, beyond, ends))
    all_packed = packed_of(count, tokens).to(tl.uint32, bitcast=True)
    low, high, at_low, at_high = lowest, highest, all_packed, none
    near_low, near_high, at_near_low, at_near_high = lowest, highest, all_packed, none
    far_low, far_high, at_far_low, at_far_high = lowest, highest, all_packed, none
    offsets = tl.where(guess % 2 == 0, 1.5, -1.5)
    behind = tl.where(guess % 2 == 0, _WINDOW, 0)
    inside, rounds = count, 0
    while inside > HELD:
        of_ends = stored_sums_above(scores_ptr, sizes_ptr, count, ends, CHUNK)
        # What is left are those of the first round and of the last.
        _store_brackets(searches_ptr, guess + tl.where(rounds == 0, 0, _ENDS), ends, of_ends)
        if rounds == 0:
            _store_brackets(searches_ptr, guess + _ENDS, ends, of_ends)
        low, high, at_low, at_high = _narrowed_known(
            low, high, at_low, at_high, ends, of_ends, wanted, wanted - 1, listed, listed - 1
        )
        near_low, near_high, at_near_low, at_near_high = _narrowed_window(
            near_low, near_high, at_near_low, at_near_high, ends, of_ends, near + _WINDOW, near
        )
        far_low, far_high, at_far_low, at_far_high = _narrowed_window(
            far_low, far_high, at_far_low, at_far_high, ends, of_ends, far + _WINDOW, far
        )
        inside = within(at_low, at_high) + within(at_near_low, at_near_high) + within(at_far_low, at_far_high)
        # If the sample has misled.
        rounds += 1
        is_middle = (guess % 2) == (rounds % 4)
        ends = guessed_keys(low, high, at_low, at_high, wanted + guess * 0, offsets, is_middle, True)
        near_ends = guessed_keys(
            near_low, near_high, at_near_low, at_near_high, near + behind, offsets, is_middle, False
        )
        far_ends = guessed_keys(far_low, far_high, at_far_low, at_far_high, far + behind, offsets, is_middle, False)
        ends = tl.where(guess < 2, ends, tl.where(guess < 4, near_ends, far_ends))
    return (
        low, high, at_low, at_high, near_low, near_high, at_near_low, at_near_high,
        far_low, far_high, at_far_low, at_far_high,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(amount: tl.tensor, part: tl.tensor, off: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return as much of a sample as is surely less than ``amount`` of all, and as much as is more."""
    of_sample = amount.to(tl.float32) * part
    return tl.maximum(of_sample - off, 0.0).to(tl.int32), tl.ceil(of_sample + off).to(tl.int32) + 1


@triton.jit  # type: ignore[untyped-decorator]
def _narrowed_known(
    low: tl.tensor,
    high: tl.tensor,
    at_low: tl.tensor,
    at_high: tl.tensor,
    guesses: tl.tensor,
    sums: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    least_listed: tl.tensor,
    most_listed: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """``narrowed`` for the end of the exact weights.

    A low end has ``least`` tokens or ``least_listed`` clusters at or above it, a high end no more than ``most`` and
    ``most_listed``.
    """
    weights, counts = weight_of(sums).to(tl.int32), count_of(sums).to(tl.int32)
    suffices = (weights >= least) | (counts >= least_listed)
    misses = (weights <= most) & (counts <= most_listed)
    return narrowed(low, high, at_low, at_high, guesses, sums, suffices, misses)


@triton.jit  # type: ignore[untyped-decorator]
def _narrowed_window(
    low: tl.tensor,
    high: tl.tensor,
    at_low: tl.tensor,
    at_high: tl.tensor,
    guesses: tl.tensor,
    sums: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """``narrowed`` for a window: a low end has ``least`` clusters at or above it, a high end no more than ``most``."""
    counts = count_of(sums).to(tl.int32)
    return narrowed(low, high, at_low, at_high, guesses, sums, counts >= least, counts <= most)


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
def _copy(copies_ptr: tl.tensor, running: tl.tensor, keys: tl.tensor, packed: tl.tensor, is_copy: tl.tensor) -> None:
    place = (running & (_FEW - 1)) - 1
    tl.store(copies_ptr + place, keys, mask=is_copy)
    tl.store(copies_ptr + _FEW + place, packed, mask=is_copy)
