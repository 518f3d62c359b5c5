"""How many tokens each query head takes.

``distribution_fit`` defines it, and ``selection`` says where this stands. Masses
are sums of float32 weights in float64, and so is the curve. They differ from the reference's by what float32 scores do,
some 1e-6 of themselves: where the share is reached within that of a token's end, one token more or less is taken.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl

from winnow_kernels.kernel_arguments import Heads, Number, Vectors
from winnow_kernels.policies.tactic.gpu.contexts import (
    NOTHING,
    Row,
    addresses_of,
    is_idle,
    keys_at,
    member_slots,
    offsets_of,
    row_at,
    span_table,
)
from winnow_kernels.policies.tactic.gpu.search import (
    BRACKETS,
    Bracket,
    guessed_keys,
    narrowed,
    number_of,
    score_key_of,
    sums_above,
    unique_keys,
    within,
)
from winnow_kernels.policies.tactic.gpu.state import (
    CUT_KEY,
    CUT_LAST,
    CUT_TAKEN,
    CUT_TOKENS,
    CUTS,
    FIT_A,
    FIT_B,
    FIT_END,
    FIT_FIRST,
    FIT_OUTSIDE,
    FIT_REFERENCE,
    FIT_TOTAL,
    FITS,
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
    TAIL_SPLITS,
    Attention,
    Contexts,
    Fitted,
    Kept,
    Ranked,
    Scored,
)
from winnow_kernels.policies.tactic.reference import WINDOW_CLUSTERS
from winnow_kernels.selection.gpu_threshold import HIGHEST, LOWEST, counted, packed_of, weight_of

CLUSTERS_OF_THREAD: Final = 32
"""Of how many clusters each thread holds score and size, at most; more threads would all compute the same curve."""

_HISTOGRAM = tl.constexpr(HISTOGRAM)
# Places on the curve that are looked at together.
_PLACES = tl.constexpr(64)
# Clusters with exact weights of which each is compared with some others at a time.
_COMPARED, _OTHERS = tl.constexpr(128), tl.constexpr(16)
_GUESSES = tl.constexpr(8)
_NEWTON_STEPS = tl.constexpr(6)
_TAIL_SPLITS = tl.constexpr(TAIL_SPLITS)
_WINDOW = tl.constexpr(WINDOW_CLUSTERS)
_MEMBERS = tl.constexpr(32)
# The asymptotic series of digamma is exact in float64 from here on.
_LARGE = tl.constexpr(16)


class Curve(NamedTuple):
    """y = a/x + b (``distribution_fit.Curve``): float64 scalars."""

    a: Number
    b: Number


class Fit(NamedTuple):
    """What is known of a query head's mass, in units of the exponential of ``reference``, which is to base 2.

    Attributes:
        reference: float32.
        outside: float64; mass of the tokens in no cluster.
        first: float64; mass of those with exact weights.
        total: float64; mass of all.
        curve: of the others' weights.
        end: int32; where the curve ends.
    """

    reference: Number
    outside: Number
    first: Number
    total: Number
    curve: Curve
    end: Number


@triton.jit  # type: ignore[untyped-decorator]
def fit_kernel(  # noqa: PLR0915 - what is found on the way stays in registers
    attention: Attention,
    heads: Heads,
    contexts: Contexts,
    scored: Scored,
    kept: Kept,
    ranked: Ranked,
    fitted: Fitted,
    block: tl.constexpr,
    known_block: tl.constexpr,
    fewest: tl.constexpr,
) -> None:
    """Find how many tokens one query head takes, in rows of more than ``fewest`` and at most ``block`` clusters."""
    head = tl.program_id(0)
    row = row_at(contexts, tl.program_id(1))
    share, tokens, count = row.share, row.clustered, row.clusters
    if is_idle(row) | (count <= fewest) | (count > block):
        return
    kv_head = head // heads.group
    of_head = row.number.to(tl.int64) * (heads.kv_heads * heads.group) + head
    sizes_ptr = scored.sizes + (row.number.to(tl.int64) * heads.kv_heads + kv_head) * scored.clusters
    scores_ptr = scored.scores + of_head * scored.clusters
    masses_ptr = ranked.masses + of_head * scored.clusters
    known_ptr = ranked.known + of_head * ranked.known_clusters
    ranks_ptr = ranked.ranks + of_head * RANKS
    cuts_ptr = fitted.cuts + of_head * CUTS
    fits_ptr = fitted.fits + of_head * FITS

    cut_key, cut_last, cut_taken, taken = tokens * 0 + HIGHEST, tokens * 0 - 1, tokens * 0, tokens * 0
    if tokens == 0:
        part_ptr = kept.tails + (of_head * _TAIL_SPLITS + tl.arange(0, _TAIL_SPLITS)) * 2
        largest = tl.load(part_ptr)
        reference = tl.max(largest, axis=0)
        outside = tl.sum((tl.load(part_ptr + 1) * tl.exp2(largest - reference)).to(tl.float64), axis=0)
        none = outside * 0
        _store_fit(fits_ptr, Fit(reference, outside, none, outside, Curve(none, none), tokens))
        tl.store(fitted.shares + of_head, outside / outside)
    else:
        # The last search reads all clusters. What it reads is asked for first, and comes while the curve is found.
        numbers_of_all = tl.max_contiguous(tl.arange(0, block), 1)
        present = numbers_of_all < count
        all_scores = tl.load(scores_ptr + numbers_of_all, mask=present, other=0.0)
        sizes = tl.load(sizes_ptr + numbers_of_all, mask=present, other=0)

        known, exact_clusters = tl.load(ranks_ptr + RANK_KNOWN), tl.load(ranks_ptr + RANK_KNOWN_CLUSTERS)
        near_tokens, far_tokens = tl.load(ranks_ptr + RANK_NEAR_TOKENS), tl.load(ranks_ptr + RANK_FAR_TOKENS)
        near_before, far_before = tl.load(ranks_ptr + RANK_NEAR_BEFORE), tl.load(ranks_ptr + RANK_FAR_BEFORE)
        place = tl.arange(0, known_block)
        is_known, is_tail, is_window = place < exact_clusters, place < _TAIL_SPLITS, place < 2 * _WINDOW
        tails_of_head = kept.tails + (of_head * _TAIL_SPLITS + place) * 2
        tail_largest = tl.load(tails_of_head, mask=is_tail, other=NOTHING)
        tail_mass = tl.load(tails_of_head + 1, mask=is_tail, other=0.0)
        window_masses = tl.load(ranked.window_masses + of_head * (2 * _WINDOW) + place, mask=is_window, other=NOTHING)
        numbers = tl.load(known_ptr + place, mask=is_known, other=0)
        masses = tl.load(masses_ptr + numbers, mask=is_known, other=NOTHING)
        # One maximum and one sum of all that there is.
        reference = tl.max(tl.maximum(masses, tl.maximum(tail_largest, window_masses)), axis=0)
        outside_weights = tail_mass * tl.exp2(tail_largest - reference)
        weights = tl.where(is_known, tl.exp2(masses - reference), 0.0)
        window_weights = tl.exp2(window_masses - reference)
        kind = tl.arange(0, 4)[:, None]
        of_windows = tl.where((kind == 2) == (place < _WINDOW)[None, :], window_weights[None, :], 0.0)
        all_weights = tl.where(kind < 2, tl.where(kind == 0, outside_weights[None, :], weights[None, :]), of_windows)
        all_sums = tl.sum(all_weights.to(tl.float64), axis=1)
        outside, first = _one_of(all_sums, 0), _one_of(all_sums, 1)
        near_mean, far_mean = _means(_one_of(all_sums, 2), near_tokens, _one_of(all_sums, 3), far_tokens)
        near_centre, far_centre = window_centre(near_before, near_tokens), window_centre(far_before, far_tokens)
        curve = _curve(near_centre, near_mean, far_centre, far_mean)
        end = _last_positive(curve, known, tokens)
        total = outside + first + curve_mass(curve, known, end.to(tl.float64))
        target = share * total - outside
        held = first
        if share >= 1:
            taken = tokens
            held = total - outside
        elif target <= 0:
            taken = known * 0
            held = first * 0
        elif target <= first:
            last_key, before = _known_cut(
                known_ptr, scores_ptr, masses_ptr, exact_clusters, reference, target, min(known_block, _COMPARED)
            )
            cut_key, cut_last = score_key_of(last_key), number_of(last_key)
            scores = tl.load(scores_ptr + numbers, mask=is_known, other=0.0)
            is_before = is_known & (unique_keys(scores, numbers) > last_key)
            start = tl.sum(tl.load(sizes_ptr + numbers, mask=is_before, other=0), axis=0)
            size = tl.minimum(tl.load(sizes_ptr + cut_last), known - start)
            cut_taken, held = _members_for(
                attention, heads, contexts, row, head, cut_last, size, before, target, reference
            )
            taken = start + cut_taken
        else:
            taken = _place_on_curve(curve, known, end, target - first)
            cut_key, cut_last = tl.load(ranks_ptr + RANK_KNOWN_KEY), tl.load(ranks_ptr + RANK_KNOWN_LAST)
            cut_taken = known - tl.load(ranks_ptr + RANK_KNOWN_START)
            held = first + curve_mass(curve, known, tl.minimum(taken, end).to(tl.float64))
        if taken > known:
            cut_key, cut_last, cut_taken = cut_of(
                all_scores, sizes, row, taken, ranked.histogram + of_head * _HISTOGRAM
            )
        _store_fit(fits_ptr, Fit(reference, outside, first, total, curve, end))
        tl.store(fitted.shares + of_head, (outside + held) / total)

    tl.store(cuts_ptr + CUT_KEY, cut_key)
    tl.store(cuts_ptr + CUT_LAST, cut_last)
    tl.store(cuts_ptr + CUT_TAKEN, cut_taken)
    tl.store(cuts_ptr + CUT_TOKENS, taken)


@triton.jit  # type: ignore[untyped-decorator]
def _store_fit(fits_ptr: tl.tensor, fit: Fit) -> None:
    tl.store(fits_ptr + FIT_REFERENCE, fit.reference.to(tl.float64))
    tl.store(fits_ptr + FIT_OUTSIDE, fit.outside)
    tl.store(fits_ptr + FIT_FIRST, fit.first)
    tl.store(fits_ptr + FIT_TOTAL, fit.total)
    tl.store(fits_ptr + FIT_A, fit.curve.a)
    tl.store(fits_ptr + FIT_B, fit.curve.b)
    tl.store(fits_ptr + FIT_END, fit.end.to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def _one_of(values: tl.tensor, index: tl.constexpr) -> tl.tensor:
    """Return one of a few values that every thread has."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0.0), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _means(
    near_mass: tl.tensor, near_tokens: tl.tensor, far_mass: tl.tensor, far_tokens: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the mean weights of both windows' tokens; where one has none, the other's."""
    near = near_mass * inverse(tl.maximum(near_tokens, 1).to(tl.float64))
    far = far_mass * inverse(tl.maximum(far_tokens, 1).to(tl.float64))
    return tl.where(near_tokens > 0, near, far), tl.where(far_tokens > 0, far, near)


@triton.jit  # type: ignore[untyped-decorator]
def window_centre(before: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """Return a window's centre in places, which count from 1: float64."""
    return before.to(tl.float64) + (tokens.to(tl.float64) + 1) * 0.5


@triton.jit  # type: ignore[untyped-decorator]
def _curve(place1: tl.tensor, weight1: tl.tensor, place2: tl.tensor, weight2: tl.tensor) -> Curve:
    """Return that of ``distribution_fit.Curve.through``."""
    falls = (weight1 > weight2) & (place1 < place2)
    of_width = inverse(tl.where(falls, place2 - place1, 1.0))
    a = tl.where(falls, (weight1 - weight2) * place1 * place2 * of_width, 0.0)
    b = tl.where(falls, (weight2 * place2 - weight1 * place1) * of_width, (weight1 + weight2) * 0.5)
    return Curve(a, b)


@triton.jit  # type: ignore[untyped-decorator]
def _last_positive(curve: Curve, first: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Return the last of the places ``first`` … ``last`` at which the curve is positive, at least ``first``; int32."""
    # Where the quotient is beyond the list it does not matter, but must remain a number.
    crossing = tl.minimum(curve.a / tl.maximum(-curve.b, 1e-290), 1e9)
    crossing = tl.where(curve.b < 0, tl.floor(crossing), last.to(tl.float64))
    return tl.maximum(tl.minimum(crossing, last.to(tl.float64)), first.to(tl.float64)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def curve_mass(curve: Curve, first: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Return the sum of the curve at places ``first`` + 1 … ``last``: float64, of the shape of ``last``."""
    start = first.to(tl.float64)
    shift = tl.maximum(_LARGE - first, 0)
    harmonic = _log_series(last + (1 + shift)) - _log_series(start + (1 + shift))
    for step in range(1, shift + 1):
        harmonic += inverse(start + step) - inverse(last + step)
    return curve.a * harmonic + curve.b * (last - start)


@triton.jit  # type: ignore[untyped-decorator]
def _log_series(x: tl.tensor) -> tl.tensor:
    """Return digamma at ``x``, float64, at least 16."""
    inverse_x = inverse(x)
    square = inverse_x * inverse_x
    series = 1.0 / 252 - square * (1.0 / 240 - square * (1.0 / 132))
    series = 1.0 / 12 - square * (1.0 / 120 - square * series)
    return tl.log(x) - inverse_x * 0.5 - square * series


@triton.jit  # type: ignore[untyped-decorator]
def inverse(x: tl.tensor) -> tl.tensor:
    """Return 1 / ``x``, float64, if it is within float32's range. A division would be a call, and hold registers."""
    approximate = (1.0 / x.to(tl.float32)).to(tl.float64)
    approximate = approximate * (2.0 - x * approximate)
    return approximate * (2.0 - x * approximate)


@triton.jit  # type: ignore[untyped-decorator]
def _place_on_curve(curve: Curve, known: tl.tensor, end: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """Return the first place, at most ``end``, up to which the curve from ``known`` on holds ``wanted``; int32."""
    # It lies behind low, and not behind high. The first guess is nearly always within a place or two.
    low, high = known, end
    stride = known * 0 + 1
    base = tl.minimum(tl.maximum(_estimated_place(curve, known, end, wanted) - _PLACES // 2, low), high)
    while low < high - 1:
        places = tl.minimum(base + (1 + tl.arange(0, _PLACES)) * stride, end)
        below = curve_mass(curve, known, places.to(tl.float64)) < wanted
        found = tl.sum(below.to(tl.int32), axis=0)
        high = tl.where(found < _PLACES, tl.minimum(base + (found + 1) * stride, high), high)
        low = tl.where(found > 0, tl.minimum(tl.maximum(base + found * stride, low), high), low)
        stride = tl.maximum(tl.cdiv(high - low, _PLACES), 1)
        base = low
    return high


@triton.jit  # type: ignore[untyped-decorator]
def _estimated_place(curve: Curve, known: tl.tensor, end: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """Return about what ``_place_on_curve`` does, by float32."""
    # Where x is the places, counted to their middles, over those known: a log(x) + b' (x - 1) = wanted. As a function
    # of y = log(x) that is convex or concave, and Newton's steps from the side chosen never overshoot.
    begin = known.to(tl.float32) + 0.5
    of_wanted = 1.0 / tl.maximum(wanted, 1e-290)
    slope = (curve.a * of_wanted).to(tl.float32)
    growth = (curve.b * of_wanted).to(tl.float32) * begin
    furthest = tl.log(tl.maximum(end.to(tl.float32) + 0.5, begin) / begin)
    y = tl.minimum(1.0 / tl.maximum(slope, 1e-30), tl.log(1.0 + 1.0 / tl.maximum(growth, 1e-30)))
    y = tl.minimum(tl.where(growth < 0, 1.0 / tl.maximum(slope, 1e-30), y), furthest)
    for _ in tl.static_range(_NEWTON_STEPS):
        x = tl.exp(y)
        off = slope * y + growth * (x - 1.0) - 1.0
        y -= off / tl.maximum(slope + growth * x, 1e-30)
        y = tl.minimum(tl.maximum(y, 0.0), furthest)
    return tl.minimum(begin * tl.exp(y), end.to(tl.float32)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def cut(
    keys: tl.tensor,
    packed: tl.tensor,
    all_packed: tl.tensor,
    wanted: tl.tensor,
    brackets_ptr: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the key of the cluster in which the first ``wanted`` tokens end, and how many tokens come before it."""
    place = tl.arange(0, BRACKETS)
    first_guesses = tl.load(brackets_ptr + place)
    first_sums = tl.load(brackets_ptr + BRACKETS + place).to(tl.uint32, bitcast=True)
    has_all = weight_of(first_sums) >= wanted
    everywhere = Bracket(wanted * 0 + LOWEST + 1, wanted * 0 + HIGHEST, all_packed, all_packed - all_packed)
    bracket = narrowed(everywhere, first_guesses, first_sums, has_all, has_all == 0)
    # Seven guesses round the line, close to it more closely, and one halves.
    guess = tl.arange(0, _GUESSES)
    halves = guess == 7
    steps = (guess - 3).to(tl.float32)
    offsets = steps * (0.2 + 0.05 * steps * steps)
    while within(bracket) > 1:
        guesses = guessed_keys(bracket, wanted + guess * 0, offsets, halves, True)
        sums = sums_above(keys, packed, guesses)
        suffices = weight_of(sums) >= wanted
        bracket = narrowed(bracket, guesses, sums, suffices, suffices == 0)
    return tl.max(tl.where(keys < bracket.high, keys, LOWEST), axis=0), weight_of(bracket.at_high).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def cut_of(
    scores: tl.tensor, sizes: tl.tensor, row: Row, wanted: tl.tensor, brackets_ptr: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return where the first ``wanted`` tokens of a query head's list end, as ``Cut`` has it: KEY, LAST and TAKEN.

    Args:
        scores: float32 [n]; of its clusters, by number.
        sizes: int32 [n].
        row: the row.
        wanted: int32 scalar, at least 1.
        brackets_ptr: what ``rank_kernel`` has left of the query head's searches.
    """
    numbers = tl.max_contiguous(tl.arange(0, scores.shape[0]), 1)
    present = numbers < row.clusters
    packed = tl.where(present, counted(sizes), 0)
    keys = tl.where(present, unique_keys(scores, numbers), LOWEST)
    all_packed = packed_of(row.clusters, row.clustered).to(tl.uint32, bitcast=True)
    last_key, start = cut(keys, packed, all_packed, wanted, brackets_ptr)
    return score_key_of(last_key), number_of(last_key), wanted - start


@triton.jit  # type: ignore[untyped-decorator]
def _known_cut(
    known_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    count: tl.tensor,
    reference: tl.tensor,
    target: tl.tensor,
    compared: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the key of the listed cluster with which the exact weights reach ``target``, and what comes before it.

    They are some forty to two hundred: what comes before each is added up in pairs, and no round waits for another.
    """
    last_key, before = count * 0 + HIGHEST, target * 0
    for begin in range(0, count, compared):
        place = begin + tl.arange(0, compared)
        number = tl.load(known_ptr + place, mask=place < count, other=0)
        score = tl.load(scores_ptr + number, mask=place < count, other=0.0)
        key = tl.where(place < count, unique_keys(score, number), HIGHEST)
        running = tl.zeros((compared,), tl.float64)
        for other_begin in range(0, count, _OTHERS):
            other_place = other_begin + tl.arange(0, _OTHERS)
            other = tl.load(known_ptr + other_place, mask=other_place < count, other=0)
            other_score = tl.load(scores_ptr + other, mask=other_place < count, other=0.0)
            mass = tl.load(masses_ptr + other, mask=other_place < count, other=NOTHING)
            weight = tl.exp2(mass - reference).to(tl.float64)
            other_key = unique_keys(other_score, other)
            running += tl.sum(tl.where(other_key[:, None] > key[None, :], weight[:, None], 0.0), axis=0)
        least = tl.min(tl.where((place < count) & (running < target), key, HIGHEST), axis=0)
        before = tl.where(least < last_key, tl.sum(tl.where(key == least, running, 0.0), axis=0), before)
        last_key = tl.minimum(last_key, least)
    return last_key, before


@triton.jit  # type: ignore[untyped-decorator]
def _members_for(
    attention: Attention,
    heads: Heads,
    contexts: Contexts,
    row: Row,
    head: tl.tensor,
    cluster: tl.tensor,
    size: tl.tensor,
    before: tl.tensor,
    target: tl.tensor,
    reference: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Return how many members of a cluster bring the mass from ``before`` to ``target``, and the mass with these.

    At least one, at most the first ``size``.
    """
    mass, held, short = before, before, size * 0
    for begin in range(0, size, _MEMBERS):
        ranks = begin + tl.arange(0, _MEMBERS)
        is_member = ranks < size
        weights = member_weights(attention, heads, contexts, row, head, cluster, ranks, is_member, reference)
        running = mass + tl.cumsum(weights, axis=0)
        short += tl.sum((is_member & (running < target)).to(tl.int32), axis=0)
        held += tl.sum(tl.where(is_member & (running - weights < target), weights, 0.0), axis=0)
        mass += tl.sum(weights, axis=0)
    return tl.minimum(short + 1, size), held


@triton.jit  # type: ignore[untyped-decorator]
def member_weights(
    attention: Attention,
    heads: Heads,
    contexts: Contexts,
    row: Row,
    head: tl.tensor,
    cluster: tl.tensor,
    ranks: tl.tensor,
    is_member: tl.tensor,
    reference: tl.tensor,
) -> tl.tensor:
    """Return the weights of members of one cluster for one query head, float64 [n]; 0 where not ``is_member``."""
    kv_head = head // heads.group
    address = addresses_of(contexts, row, cluster, cluster >= 0, kv_head)
    first = tl.load(contexts.tables.firsts + (address + ranks * 0), mask=is_member, other=0)
    offset_ptr = offsets_of(contexts.tables, kv_head) + first + ranks
    slots = member_slots(contexts, span_table(contexts, row), offset_ptr, cluster, is_member)
    keys = keys_at(attention.keys, kv_head, slots, is_member, heads).to(tl.float32)
    scores = tl.sum(keys * head_query(attention.queries, heads, row, head)[None, :], axis=1) * attention.scale_log2
    return tl.where(is_member, tl.exp2(tl.where(is_member, scores - reference, 0.0)), 0.0).to(tl.float64)


@triton.jit  # type: ignore[untyped-decorator]
def head_query(queries: Vectors, heads: Heads, row: Row, head: tl.tensor) -> tl.tensor:
    """Return one query head's query: float32 [dim_block]."""
    dims = tl.arange(0, heads.dim_block)
    query_ptr = queries.pointer + (row.number.to(tl.int64) * queries.row_stride + head * heads.head_dim)
    return tl.load(query_ptr + dims, mask=dims < heads.head_dim, other=0.0).to(tl.float32)
