"""How many tokens each query head takes, and what its KV head reads of clusters for them.

``winnow_kernels.distribution_fit`` defines the first, and ``winnow_kernels.gpu.tactic`` says where this stands. Masses
are sums of float32 weights in float64, and so is the curve. They differ from the reference's by what float32 scores do,
some 1e-6 of themselves: where the share is reached within that of a token's end, one token more or less is taken.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.gpu.batch import WHOLE
from winnow_kernels.gpu.tactic_state import (
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
    NOTHING,
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
    UNION_CLUSTERS,
    UNION_TAKEN,
    UNION_WANTED,
    UNIONS,
    addresses_of,
    count_read,
    exceeds,
    is_idle,
    kept_tokens,
    keys_at,
    member_slots,
    through,
    tied,
)
from winnow_kernels.gpu.threshold import (
    HIGHEST,
    LOWEST,
    count_of,
    counted,
    counted_threshold,
    interpolated_key,
    ordered,
    weight_of,
)
from winnow_kernels.tactic import WINDOW_CLUSTERS

STEPS: Final = 512
"""Places that are looked at together: two rounds of so many are enough for 2^18 tokens."""

_STEPS = tl.constexpr(STEPS)
_WHOLE = tl.constexpr(WHOLE)
_TAIL_SPLITS = tl.constexpr(TAIL_SPLITS)
_WINDOW = tl.constexpr(WINDOW_CLUSTERS)
_MEMBERS = tl.constexpr(32)
# The asymptotic series of digamma is exact in float64 from here on.
_LARGE = tl.constexpr(16)


@triton.jit  # type: ignore[untyped-decorator]
def fit_kernel(  # noqa: PLR0915 - what is found on the way stays in registers
    queries_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    clustered_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    caps_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    known_ptr: tl.tensor,
    tails_ptr: tl.tensor,
    window_masses_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    cuts_ptr: tl.tensor,
    fits_ptr: tl.tensor,
    head_shares_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    unions_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    needed_ptr: tl.tensor,
    places_ptr: tl.tensor,
    capped_ptr: tl.tensor,
    selected_ptr: tl.tensor,
    scale_log2: tl.tensor,
    query_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    entries_stride: tl.tensor,
    capacity: tl.tensor,
    member_bytes: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    page_size: tl.constexpr,
    span: tl.constexpr,
    of_span: tl.constexpr,
    block: tl.constexpr,
    known_block: tl.constexpr,
) -> None:
    """Find how many tokens one query head takes; the last of a group to know unites what the group takes."""
    head, row = tl.program_id(0), tl.program_id(1)
    kv_head = head // group
    share, cap = tl.load(shares_ptr + row), tl.load(caps_ptr + row)
    length, tokens = tl.load(lengths_ptr + row), tl.load(clustered_ptr + row)
    of_kv_head = row.to(tl.int64) * kv_heads + kv_head
    if is_idle(share, length, tokens, cap):
        if share > 0:
            tl.store(unions_ptr + of_kv_head * UNIONS + UNION_TAKEN, -1)
            tl.store(selected_ptr + of_kv_head, _WHOLE)
        return
    of_head = row.to(tl.int64) * (kv_heads * group) + head
    entries_ptr += row * entries_stride
    ranks_ptr += of_head * RANKS
    cuts_ptr += of_head * CUTS
    fits_ptr += of_head * FITS

    part = tl.arange(0, _TAIL_SPLITS)
    tail_largest = tl.load(tails_ptr + (of_head * _TAIL_SPLITS + part) * 2)
    tail_mass = tl.load(tails_ptr + (of_head * _TAIL_SPLITS + part) * 2 + 1)
    cut_key, cut_last, cut_taken, taken = tokens * 0 + HIGHEST, tokens * 0 - 1, tokens * 0, tokens * 0
    if tokens == 0:
        reference = tl.max(tail_largest, axis=0)
        outside = tl.sum((tail_mass * tl.exp2(tail_largest - reference)).to(tl.float64), axis=0)
        _store_fit(fits_ptr, reference, outside, outside * 0, outside, outside * 0, outside * 0, tokens)
        tl.store(head_shares_ptr + of_head, outside / outside)
    else:
        known, known_clusters = tl.load(ranks_ptr + RANK_KNOWN), tl.load(ranks_ptr + RANK_KNOWN_CLUSTERS)
        place = tl.arange(0, known_block)
        is_known = place < known_clusters
        numbers = tl.load(known_ptr + of_head * known_block + place, mask=is_known, other=0)
        keys = ordered(tl.load(scores_ptr + of_head * block + numbers, mask=is_known, other=0.0))
        keys = tl.where(is_known, keys, LOWEST)
        masses = tl.load(masses_ptr + of_head * block + numbers, mask=is_known, other=NOTHING)
        window = tl.arange(0, _WINDOW)
        near_masses = tl.load(window_masses_ptr + of_head * (2 * _WINDOW) + window)
        far_masses = tl.load(window_masses_ptr + of_head * (2 * _WINDOW) + _WINDOW + window)
        reference = tl.maximum(tl.max(tail_largest, axis=0), tl.max(masses, axis=0))
        reference = tl.maximum(reference, tl.maximum(tl.max(near_masses, axis=0), tl.max(far_masses, axis=0)))

        outside = tl.sum((tail_mass * tl.exp2(tail_largest - reference)).to(tl.float64), axis=0)
        weights = tl.where(is_known, tl.exp2(masses - reference), 0.0).to(tl.float64)
        first = tl.sum(weights, axis=0)
        near_centre, near_mean = _point(
            near_masses, reference, tl.load(ranks_ptr + RANK_NEAR_BEFORE), tl.load(ranks_ptr + RANK_NEAR_TOKENS)
        )
        far_centre, far_mean = _point(
            far_masses, reference, tl.load(ranks_ptr + RANK_FAR_BEFORE), tl.load(ranks_ptr + RANK_FAR_TOKENS)
        )
        a, b = _curve(near_centre, near_mean, far_centre, far_mean)
        end = _last_positive(a, b, known, tokens)
        total = outside + first + curve_mass(a, b, known, end.to(tl.float64))
        target = share * total - outside
        held = first
        if share >= 1:
            taken = tokens
            held = total - outside
        elif target <= 0:
            taken = known * 0
            held = first * 0
        elif target <= first:
            cut_key, before = _mass_threshold(keys, weights, is_known, target, first, known_clusters)
            cut_last, before = tied(keys, weights, numbers, cut_key, before, target)
            is_before = is_known & through(keys, numbers, cut_key, cut_last - 1)
            addresses = addresses_of(entries_ptr, numbers, is_before, kv_head, capacity, of_span)
            start = tl.sum(tl.load(sizes_ptr + addresses, mask=is_before, other=0).to(tl.int32), axis=0)
            last_address = addresses_of(entries_ptr, cut_last, cut_last >= 0, kv_head, capacity, of_span)
            size = tl.minimum(tl.load(sizes_ptr + last_address).to(tl.int32), known - start)
            cut_taken, held = _members_for(
                queries_ptr, keys_ptr + kv_head * head_stride, firsts_ptr, offsets_ptr, table_ptr + row * table_stride,
                row.to(tl.int64) * query_stride + head * head_dim, last_address, cut_last, size, kv_head, before,
                target, reference, scale_log2, slot_stride, capacity,
                head_dim, dim_block, of_span, span, page_size,
            )  # fmt: skip
            taken = start + cut_taken
        else:
            taken = _place_on_curve(a, b, known, tokens, end, target - first)
            cut_key, cut_last = tl.load(ranks_ptr + RANK_KNOWN_KEY), tl.load(ranks_ptr + RANK_KNOWN_LAST)
            cut_taken = known - tl.load(ranks_ptr + RANK_KNOWN_START)
            held = first + curve_mass(a, b, known, tl.minimum(taken, end).to(tl.float64))
        if taken > known:
            count = tokens // span * of_span
            numbers_of_all = tl.max_contiguous(tl.arange(0, block), 1)
            present = numbers_of_all < count
            all_keys = ordered(tl.load(scores_ptr + of_head * block + numbers_of_all, mask=present, other=0.0))
            addresses_of_all = addresses_of(entries_ptr, numbers_of_all, present, kv_head, capacity, of_span)
            sizes = tl.load(sizes_ptr + addresses_of_all, mask=present, other=0).to(tl.int32)
            packed = tl.where(present, counted(sizes), 0)
            cut_key, _, reached = counted_threshold(all_keys, packed, taken, taken < 0)
            cut_last, start_of_last = tied(all_keys, weight_of(packed), numbers_of_all, cut_key, reached, taken)
            cut_taken = taken - start_of_last
        _store_fit(fits_ptr, reference, outside, first, total, a, b, end)
        tl.store(head_shares_ptr + of_head, (outside + held) / total)

    tl.store(cuts_ptr + CUT_KEY, cut_key)
    tl.store(cuts_ptr + CUT_LAST, cut_last)
    tl.store(cuts_ptr + CUT_TAKEN, cut_taken)
    tl.store(cuts_ptr + CUT_TOKENS, taken)
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr + of_kv_head, 1, sem="acq_rel", scope="gpu") != group - 1:
        return
    tl.store(arrivals_ptr + of_kv_head, 0)
    first_head = of_kv_head * group
    _unite(
        scores_ptr + first_head * block, cuts_ptr + (first_head - of_head) * CUTS, sizes_ptr, entries_ptr,
        unions_ptr + of_kv_head * UNIONS, listed_ptr + of_kv_head * block, needed_ptr + of_kv_head * block,
        places_ptr + of_kv_head * block, capped_ptr + row, selected_ptr + of_kv_head, counts_ptr, row, kv_head,
        length, tokens, cap, capacity, member_bytes, group, span, of_span, block,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _store_fit(
    fits_ptr: tl.tensor,
    reference: tl.tensor,
    outside: tl.tensor,
    first: tl.tensor,
    total: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    end: tl.tensor,
) -> None:
    tl.store(fits_ptr + FIT_REFERENCE, reference.to(tl.float64))
    tl.store(fits_ptr + FIT_OUTSIDE, outside)
    tl.store(fits_ptr + FIT_FIRST, first)
    tl.store(fits_ptr + FIT_TOTAL, total)
    tl.store(fits_ptr + FIT_A, a)
    tl.store(fits_ptr + FIT_B, b)
    tl.store(fits_ptr + FIT_END, end.to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def _point(
    masses: tl.tensor, reference: tl.tensor, before: tl.tensor, tokens: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return a window's centre, in places counted from 1, and its tokens' mean weight; float64."""
    mass = tl.sum(tl.exp2(masses - reference).to(tl.float64), axis=0)
    centre = before.to(tl.float64) + (tokens.to(tl.float64) + 1) / 2
    return centre, mass / tl.maximum(tokens, 1).to(tl.float64)


@triton.jit  # type: ignore[untyped-decorator]
def _curve(place1: tl.tensor, weight1: tl.tensor, place2: tl.tensor, weight2: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return a and b of ``Curve.through``."""
    falls = (weight1 > weight2) & (place1 < place2)
    width = tl.where(falls, place2 - place1, 1.0)
    a = tl.where(falls, (weight1 - weight2) * place1 * place2 / width, 0.0)
    b = tl.where(falls, (weight2 * place2 - weight1 * place1) / width, (weight1 + weight2) / 2)
    return a, b


@triton.jit  # type: ignore[untyped-decorator]
def _last_positive(a: tl.tensor, b: tl.tensor, first: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Return the last of the places ``first`` … ``last`` at which the curve is positive, at least ``first``; int32."""
    # Where the quotient is beyond the list it does not matter, but must remain a number.
    crossing = tl.minimum(a / tl.maximum(-b, 1e-290), 1e9)
    crossing = tl.where(b < 0, tl.floor(crossing), last.to(tl.float64))
    return tl.maximum(tl.minimum(crossing, last.to(tl.float64)), first.to(tl.float64)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def curve_mass(a: tl.tensor, b: tl.tensor, first: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Return the sum of the curve at places ``first`` + 1 … ``last``: float64, of the shape of ``last``."""
    start = first.to(tl.float64)
    harmonic = _log_series(last + 1) - _log_series(start + 1)
    if first + 1 < _LARGE:
        harmonic = harmonic * 0
        for step in range(1, _LARGE + 1):
            harmonic += 1 / (start + step) - 1 / (last + step)
        harmonic += _log_series(last + (1 + _LARGE)) - _log_series(start + (1 + _LARGE))
    return a * harmonic + b * (last - start)


@triton.jit  # type: ignore[untyped-decorator]
def _log_series(x: tl.tensor) -> tl.tensor:
    """Return digamma at ``x``, float64, at least 16."""
    inverse = 1 / x
    square = inverse * inverse
    series = 1.0 / 252 - square * (1.0 / 240 - square * (1.0 / 132))
    series = 1.0 / 12 - square * (1.0 / 120 - square * series)
    return tl.log(x) - inverse * 0.5 - square * series


@triton.jit  # type: ignore[untyped-decorator]
def _place_on_curve(
    a: tl.tensor, b: tl.tensor, known: tl.tensor, tokens: tl.tensor, end: tl.tensor, wanted: tl.tensor
) -> tl.tensor:
    """Return the first place, at most ``end``, up to which the curve from ``known`` on holds ``wanted``; int32."""
    stride = tl.maximum(tl.ceil(tl.sqrt(tokens.to(tl.float64))).to(tl.int32), 1)
    steps = 1 + tl.arange(0, _STEPS)
    coarse = tl.minimum(known + steps * stride, end)
    below = (curve_mass(a, b, known, coarse.to(tl.float64)) < wanted) & (steps <= stride)
    base = known + tl.sum(below.to(tl.int32), axis=0) * stride
    fine = tl.minimum(base + steps, end)
    below = (curve_mass(a, b, known, fine.to(tl.float64)) < wanted) & (steps <= stride)
    return tl.minimum(base + tl.sum(below.to(tl.int32), axis=0) + 1, end)


@triton.jit  # type: ignore[untyped-decorator]
def _mass_threshold(
    keys: tl.tensor, weights: tl.tensor, present: tl.tensor, target: tl.tensor, total: tl.tensor, count: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the largest key at or above which the weights, float64, sum to ``target``, at most all, and that sum."""
    low = tl.min(tl.where(present, keys, HIGHEST), axis=0)
    high = tl.minimum(tl.max(tl.where(present, keys, LOWEST), axis=0), HIGHEST - 1) + 1
    at_low, at_high = total, total * 0
    between = count
    number = count.to(tl.float64) / total
    halve = target.to(tl.int32) * 0 + 2
    while (between > 1) & (low + 1 < high):
        guess = interpolated_key(low, high, at_low * number, at_high * number, target * number, count.to(tl.float64))
        middle = (low & high) + ((low ^ high) >> 1)
        guess = tl.where(halve == 0, middle, tl.minimum(tl.maximum(guess, low + 1), high - 1))
        above = tl.sum(tl.where(keys >= guess, weights, 0.0), axis=0)
        suffices = above >= target
        at_low, low = tl.where(suffices, above, at_low), tl.where(suffices, guess, low)
        at_high, high = tl.where(suffices, at_high, above), tl.where(suffices, high, guess)
        between = tl.sum((present & (keys >= low) & (keys < high)).to(tl.int32), axis=0)
        halve = tl.where(halve == 0, 2, halve - 1)
    return tl.min(tl.where(present & (keys >= low), keys, HIGHEST), axis=0), at_low


@triton.jit  # type: ignore[untyped-decorator]
def _members_for(
    queries_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    table_ptr: tl.tensor,
    query: tl.tensor,
    address: tl.tensor,
    cluster: tl.tensor,
    size: tl.tensor,
    kv_head: tl.tensor,
    before: tl.tensor,
    target: tl.tensor,
    reference: tl.tensor,
    scale_log2: tl.tensor,
    slot_stride: tl.tensor,
    capacity: tl.tensor,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    of_span: tl.constexpr,
    span: tl.constexpr,
    page_size: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return how many members of a cluster bring the mass from ``before`` to ``target``, and the mass with these.

    At least one, at most the first ``size``. ``query`` is where the query head's query lies.
    """
    mass, held, short = before, before, size * 0
    for begin in range(0, size, _MEMBERS):
        ranks = begin + tl.arange(0, _MEMBERS)
        is_member = ranks < size
        weights = member_weights(
            queries_ptr, keys_ptr, firsts_ptr, offsets_ptr, table_ptr, query, address, cluster, ranks, is_member,
            kv_head, reference, scale_log2, slot_stride, capacity, head_dim, dim_block, of_span, span, page_size,
        )  # fmt: skip
        running = mass + tl.cumsum(weights, axis=0)
        short += tl.sum((is_member & (running < target)).to(tl.int32), axis=0)
        held += tl.sum(tl.where(is_member & (running - weights < target), weights, 0.0), axis=0)
        mass += tl.sum(weights, axis=0)
    return tl.minimum(short + 1, size), held


@triton.jit  # type: ignore[untyped-decorator]
def member_weights(
    queries_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    table_ptr: tl.tensor,
    query: tl.tensor,
    address: tl.tensor,
    cluster: tl.tensor,
    ranks: tl.tensor,
    is_member: tl.tensor,
    kv_head: tl.tensor,
    reference: tl.tensor,
    scale_log2: tl.tensor,
    slot_stride: tl.tensor,
    capacity: tl.tensor,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    of_span: tl.constexpr,
    span: tl.constexpr,
    page_size: tl.constexpr,
) -> tl.tensor:
    """Return the weights of members of one cluster for one query head, float64 [n]; 0 where not ``is_member``."""
    slots = member_slots(
        firsts_ptr, offsets_ptr, table_ptr, address + ranks * 0, cluster, ranks, is_member, kv_head, capacity, of_span,
        span, page_size,
    )  # fmt: skip
    keys = keys_at(keys_ptr, slots, is_member, slot_stride, head_dim, dim_block).to(tl.float32)
    dims = tl.arange(0, dim_block)
    of_head = tl.load(queries_ptr + query + dims, mask=dims < head_dim, other=0.0).to(tl.float32)
    scores = tl.sum(keys * of_head[None, :], axis=1) * scale_log2
    return tl.where(is_member, tl.exp2(tl.where(is_member, scores - reference, 0.0)), 0.0).to(tl.float64)


@triton.jit  # type: ignore[untyped-decorator]
def _unite(
    scores_ptr: tl.tensor,
    cuts_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    union_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    needed_ptr: tl.tensor,
    places_ptr: tl.tensor,
    capped_ptr: tl.tensor,
    selected_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    row: tl.tensor,
    kv_head: tl.tensor,
    length: tl.tensor,
    tokens: tl.tensor,
    cap: tl.tensor,
    capacity: tl.tensor,
    member_bytes: tl.tensor,
    group: tl.constexpr,
    span: tl.constexpr,
    of_span: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """List the clusters of which some query head of a group takes something, by number, and how much of each."""
    count = tokens // span * of_span
    # As in ``rank_kernel``: one layout for all.
    numbers = tl.max_contiguous(tl.arange(0, block), 1)
    present = numbers < count
    addresses = addresses_of(entries_ptr, numbers, present, kv_head, capacity, of_span)
    sizes = tl.load(sizes_ptr + addresses, mask=present, other=0).to(tl.int32)
    needed = tl.zeros((block,), tl.int32)
    for head in range(group):
        # What other programs have just written is in the L2 cache.
        key = tl.load(cuts_ptr + head * CUTS + CUT_KEY, cache_modifier=".cg")
        last = tl.load(cuts_ptr + head * CUTS + CUT_LAST, cache_modifier=".cg")
        taken = tl.load(cuts_ptr + head * CUTS + CUT_TAKEN, cache_modifier=".cg")
        keys = ordered(tl.load(scores_ptr + head * block + numbers, mask=present, other=0.0))
        of_head = tl.where(through(keys, numbers, key, last - 1), sizes, 0)
        of_head = tl.where(numbers == last, taken, of_head)
        needed = tl.maximum(needed, tl.where(present, of_head, 0))
    is_needed = needed > 0
    packed = tl.where(is_needed, counted(needed), 0)
    all_packed = tl.sum(packed, axis=0)
    listed, wanted = count_of(all_packed), weight_of(all_packed)
    kept = kept_tokens(length, tokens, cap)
    taken = tl.minimum(wanted, tl.where(cap > 0, cap, length) - kept)
    is_whole = exceeds(kept + taken, length)
    tl.store(union_ptr + UNION_CLUSTERS, listed)
    tl.store(union_ptr + UNION_WANTED, wanted)
    tl.store(union_ptr + UNION_TAKEN, tl.where(is_whole, -1, taken))
    tl.store(selected_ptr, tl.where(is_whole, _WHOLE, kept + taken))
    if is_whole == 0:
        count_read(counts_ptr, row, taken * member_bytes)
        if length - tokens + wanted > kept + taken:
            tl.store(capped_ptr, 1)

    running = tl.cumsum(packed, axis=0)
    place = count_of(running) - 1
    tl.store(listed_ptr + place, numbers, mask=is_needed)
    tl.store(needed_ptr + place, needed, mask=is_needed)
    tl.store(places_ptr + place, weight_of(running) - needed, mask=is_needed)
