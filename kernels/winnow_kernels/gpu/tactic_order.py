"""The order in which clusters are read, and what a cap leaves of them (``winnow_kernels.gpu.tactic``).

Only early termination and a cap that cuts need an order. A cluster's place is how much of others comes before it: that
takes as many comparisons as pairs of listed clusters, for some hundred clusters less than a sort, and splits well.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.gpu.tactic_fit import curve_mass, member_weights
from winnow_kernels.gpu.tactic_state import (
    CUT_KEY,
    CUT_LAST,
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
    RANK_KNOWN,
    RANK_KNOWN_CLUSTERS,
    RANKS,
    SLICE,
    addresses_of,
    is_idle,
    keys_at,
    needs_order,
    slots_at,
    through,
    tied,
    united,
)
from winnow_kernels.gpu.threshold import HIGHEST, LOWEST, count_of, counted, counted_threshold, ordered

SPLITS: Final = 32
"""Programs among which the listed clusters of a row and KV head are dealt out."""
PLACED: Final = 16
"""Clusters that are compared with others at a time; in lists of several query heads not so many."""

_SLICE = tl.constexpr(SLICE)
_COMPARED = tl.constexpr(64)
_TOKEN_TILE = tl.constexpr(64)


@triton.jit  # type: ignore[untyped-decorator]
def _listed_at(places: tl.tensor, totals: tl.tensor) -> tl.tensor:
    """Return where in the lists, which lie by slice, those at ``places`` of all listed clusters are; int32 [n]."""
    counts = count_of(totals)
    ends = tl.cumsum(counts, axis=0)
    gaps = tl.where(ends[None, :] <= places[:, None], _SLICE - counts[None, :], 0)
    return places + tl.sum(gaps, axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def best_kernel(
    lengths_ptr: tl.tensor,
    clustered_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    caps_ptr: tl.tensor,
    ordered_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    cuts_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    cluster_sizes_ptr: tl.tensor,
    best_ptr: tl.tensor,
    clusters: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    group_block: tl.constexpr,
    placed: tl.constexpr,
) -> None:
    """Find the listed clusters' best places in the lists of the query heads that need them."""
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share, cap = tl.load(shares_ptr + row), tl.load(caps_ptr + row)
    length, clustered = tl.load(lengths_ptr + row), tl.load(clustered_ptr + row)
    if is_idle(share, length, clustered, cap):
        return
    of_kv_head = row.to(tl.int64) * kv_heads + kv_head
    slices: tl.constexpr = clusters // _SLICE
    totals, _, taken, wanted = united(totals_ptr + of_kv_head * slices, length, clustered, cap, slices)
    listed = tl.sum(count_of(totals), axis=0)
    if (needs_order(taken, wanted, tl.load(ordered_ptr + row)) == 0) | (part * placed >= listed):
        return
    listed_ptr += of_kv_head * clusters
    cluster_sizes_ptr += of_kv_head * clusters
    heads = tl.arange(0, group_block)
    is_head = heads < group
    of_heads = of_kv_head * group + heads
    cut_key = tl.load(cuts_ptr + of_heads * CUTS + CUT_KEY, mask=is_head, other=HIGHEST)
    cut_last = tl.load(cuts_ptr + of_heads * CUTS + CUT_LAST, mask=is_head, other=-1)
    scores_ptr += of_heads[:, None] * clusters
    for begin in range(part * placed, listed, tl.num_programs(0) * placed):
        place = begin + tl.arange(0, placed)
        is_listed = place < listed
        at = _listed_at(place, totals)
        number = tl.load(listed_ptr + at, mask=is_listed, other=0)
        key = ordered(tl.load(scores_ptr + number[None, :], mask=is_head[:, None] & is_listed[None, :], other=0.0))
        starts = tl.zeros((group_block, placed), tl.int32)
        for other_begin in range(0, listed, _COMPARED):
            other_place = other_begin + tl.arange(0, _COMPARED)
            is_other = other_place < listed
            other_at = _listed_at(other_place, totals)
            other = tl.load(listed_ptr + other_at, mask=is_other, other=0)
            size = tl.load(cluster_sizes_ptr + other, mask=is_other, other=0)
            is_compared = is_head[:, None] & is_other[None, :]
            other_key = ordered(tl.load(scores_ptr + other[None, :], mask=is_compared, other=0.0))
            # They are listed by number.
            precedes = through(
                other_key[:, None, :], other_place[None, None, :], key[:, :, None], place[None, :, None] - 1
            )
            starts += tl.sum(tl.where(precedes, size[None, None, :], 0), axis=2)
        is_needed = is_head[:, None] & through(key, number[None, :], cut_key[:, None], cut_last[:, None])
        best = tl.min(tl.where(is_needed, starts, HIGHEST), axis=0)
        tl.store(best_ptr + of_kv_head * clusters + at, best, mask=is_listed)


@triton.jit  # type: ignore[untyped-decorator]
def place_kernel(
    lengths_ptr: tl.tensor,
    clustered_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    caps_ptr: tl.tensor,
    ordered_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    needed_ptr: tl.tensor,
    best_ptr: tl.tensor,
    places_ptr: tl.tensor,
    lost_ptr: tl.tensor,
    clusters: tl.constexpr,
    kv_heads: tl.constexpr,
    placed: tl.constexpr,
) -> None:
    """Put the listed clusters in order: by best place, then by number; and find what the cap cuts first."""
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share, cap = tl.load(shares_ptr + row), tl.load(caps_ptr + row)
    length, clustered = tl.load(lengths_ptr + row), tl.load(clustered_ptr + row)
    if is_idle(share, length, clustered, cap):
        return
    of_kv_head = row.to(tl.int64) * kv_heads + kv_head
    slices: tl.constexpr = clusters // _SLICE
    totals, _, taken, wanted = united(totals_ptr + of_kv_head * slices, length, clustered, cap, slices)
    listed = tl.sum(count_of(totals), axis=0)
    if (needs_order(taken, wanted, tl.load(ordered_ptr + row)) == 0) | (part * placed >= listed):
        return
    needed_ptr += of_kv_head * clusters
    best_ptr += of_kv_head * clusters
    for begin in range(part * placed, listed, tl.num_programs(0) * placed):
        place = begin + tl.arange(0, placed)
        is_listed = place < listed
        at = _listed_at(place, totals)
        best = tl.load(best_ptr + at, mask=is_listed, other=0)
        needed = tl.load(needed_ptr + at, mask=is_listed, other=0)
        before = tl.zeros((placed,), tl.int32)
        for other_begin in range(0, listed, _COMPARED):
            other_place = other_begin + tl.arange(0, _COMPARED)
            other_at = _listed_at(other_place, totals)
            other_best = tl.load(best_ptr + other_at, mask=other_place < listed, other=0)
            other_needed = tl.load(needed_ptr + other_at, mask=other_place < listed, other=0)
            precedes = through(-other_best[None, :], other_place[None, :], -best[:, None], place[:, None] - 1)
            before += tl.sum(tl.where(precedes, other_needed[None, :], 0), axis=1)
        tl.store(places_ptr + of_kv_head * clusters + at, before, mask=is_listed)
        is_cut = is_listed & (before <= taken) & (before + needed > taken)
        tl.store(lost_ptr + of_kv_head + place * 0, best + taken - before, mask=is_cut)


@triton.jit  # type: ignore[untyped-decorator]
def capped_share_kernel(  # noqa: PLR0915 - what is found on the way stays in registers
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
    scores_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    known_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    cuts_ptr: tl.tensor,
    fits_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    lost_ptr: tl.tensor,
    head_shares_ptr: tl.tensor,
    scale_log2: tl.tensor,
    query_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    entries_stride: tl.tensor,
    capacity: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    page_size: tl.constexpr,
    span: tl.constexpr,
    of_span: tl.constexpr,
    clusters: tl.constexpr,
    known_block: tl.constexpr,
) -> None:
    """State the share of one query head that a cap leaves; keys that were read for the fit are looked at once more."""
    head, row = tl.program_id(0), tl.program_id(1)
    kv_head = head // group
    share, cap = tl.load(shares_ptr + row), tl.load(caps_ptr + row)
    length, clustered = tl.load(lengths_ptr + row), tl.load(clustered_ptr + row)
    if is_idle(share, length, clustered, cap) | (cap == 0):
        return
    of_kv_head = row.to(tl.int64) * kv_heads + kv_head
    slices: tl.constexpr = clusters // _SLICE
    _totals, kept, taken, wanted = united(totals_ptr + of_kv_head * slices, length, clustered, cap, slices)
    if (taken < 0) | (kept + taken == length - clustered + wanted):
        return
    of_head = row.to(tl.int64) * (kv_heads * group) + head
    keys_ptr += kv_head * head_stride
    table_ptr += row * table_stride
    entries_ptr += row * entries_stride
    fits_ptr += of_head * FITS
    reference = tl.load(fits_ptr + FIT_REFERENCE).to(tl.float32)
    query = row.to(tl.int64) * query_stride + head * head_dim

    held = tl.load(fits_ptr + FIT_OUTSIDE)
    if kept < length - clustered:
        dims = tl.arange(0, dim_block)
        of_query = tl.load(queries_ptr + query + dims, mask=dims < head_dim, other=0.0).to(tl.float32)
        held = held * 0
        for begin in range(0, kept, _TOKEN_TILE):
            newest = begin + tl.arange(0, _TOKEN_TILE)
            slots = slots_at(table_ptr, length - 1 - newest, newest < kept, page_size)
            keys = keys_at(keys_ptr, slots, newest < kept, slot_stride, head_dim, dim_block).to(tl.float32)
            scores = tl.sum(keys * of_query[None, :], axis=1) * scale_log2
            weights = tl.exp2(tl.where(newest < kept, scores - reference, NOTHING))
            held += tl.sum(weights.to(tl.float64), axis=0)
    tokens = tl.load(cuts_ptr + of_head * CUTS + CUT_TOKENS)
    if wanted > taken:
        # No list is cut before the best place of the first token that is lost.
        tokens = tl.minimum(tokens, tl.where(taken > 0, tl.load(lost_ptr + of_kv_head), 0))
    if tokens > 0:
        known = tl.load(ranks_ptr + of_head * RANKS + RANK_KNOWN)
        first = tl.load(fits_ptr + FIT_FIRST)
        a, b = tl.load(fits_ptr + FIT_A), tl.load(fits_ptr + FIT_B)
        if tokens >= known:
            end = tl.load(fits_ptr + FIT_END).to(tl.int32)
            held += first + curve_mass(a, b, known, tl.minimum(tokens, end).to(tl.float64))
        else:
            known_clusters = tl.load(ranks_ptr + of_head * RANKS + RANK_KNOWN_CLUSTERS)
            place = tl.arange(0, known_block)
            is_known = place < known_clusters
            numbers = tl.load(known_ptr + of_head * known_block + place, mask=is_known, other=0)
            keys = ordered(tl.load(scores_ptr + of_head * clusters + numbers, mask=is_known, other=0.0))
            keys = tl.where(is_known, keys, LOWEST)
            addresses = addresses_of(entries_ptr, numbers, is_known, kv_head, capacity, of_span)
            sizes = tl.load(sizes_ptr + addresses, mask=is_known, other=0).to(tl.int32)
            key, _, reached = counted_threshold(keys, tl.where(is_known, counted(sizes), 0), tokens, tokens < 0)
            last, start = tied(keys, sizes, numbers, key, reached, tokens)
            is_before = is_known & through(keys, numbers, key, last - 1)
            masses = tl.load(masses_ptr + of_head * clusters + numbers, mask=is_before, other=NOTHING)
            held += tl.sum(tl.exp2(masses - reference).to(tl.float64), axis=0)
            address = addresses_of(entries_ptr, last, last >= 0, kv_head, capacity, of_span)
            for begin in range(0, tokens - start, _TOKEN_TILE):
                ranks = begin + tl.arange(0, _TOKEN_TILE)
                weights = member_weights(
                    queries_ptr, keys_ptr, firsts_ptr, offsets_ptr, table_ptr, query, address, last, ranks,
                    ranks < tokens - start, kv_head, reference, scale_log2, slot_stride, capacity, head_dim, dim_block,
                    of_span, span, page_size,
                )  # fmt: skip
                held += tl.sum(weights, axis=0)
    tl.store(head_shares_ptr + of_head, held / tl.load(fits_ptr + FIT_TOTAL))
