"""What a cap leaves of the share of the mass (``selection``).

A cap keeps the front of the order in which clusters are read. Of a query head's own list that leaves what comes before
the first token lost, and the curve says what that holds. Keys that were read for the fit are looked at once more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.policies.tactic.gpu.fit import curve_mass, member_weights
from winnow_kernels.policies.tactic.gpu.search import unique_keys
from winnow_kernels.policies.tactic.gpu.state import (
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
    kept_positions,
    keys_at,
    shape_of,
    slots_at,
    span_table,
    through,
    tied,
    united,
)
from winnow_kernels.policies.tactic.reference import SHARE_STEPS
from winnow_kernels.selection.gpu_threshold import LOWEST, counted, counted_threshold, ordered

_SLICE = tl.constexpr(SLICE)
_STEPS = tl.constexpr(SHARE_STEPS)
_TOKEN_TILE = tl.constexpr(64)
# Listed clusters that are looked at together.
_LISTED = tl.constexpr(1024)


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
    sinks_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    caps_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    known_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    cuts_ptr: tl.tensor,
    fits_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    needed_ptr: tl.tensor,
    placed_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    places_ptr: tl.tensor,
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
    """State the share of one query head that a cap leaves."""
    head, row = tl.program_id(0), tl.program_id(1)
    kv_head = head // group
    share, cap = tl.load(shares_ptr + row), tl.load(caps_ptr + row)
    length, sinks, clustered, count = shape_of(lengths_ptr, clustered_ptr, sinks_ptr, row, span, of_span)
    if is_idle(share, length, clustered, cap) | (cap == 0):
        return
    of_kv_head = row.to(tl.int64) * kv_heads + kv_head
    slices: tl.constexpr = clusters // _SLICE
    _totals, kept, taken, wanted = united(totals_ptr + of_kv_head * slices, length, clustered, count, cap, slices)
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
            places = begin + tl.arange(0, _TOKEN_TILE)
            positions = kept_positions(places, length, sinks)
            slots = slots_at(table_ptr, positions, places < kept, page_size)
            keys = keys_at(keys_ptr, slots, places < kept, slot_stride, head_dim, dim_block).to(tl.float32)
            scores = tl.sum(keys * of_query[None, :], axis=1) * scale_log2
            weights = tl.exp2(tl.where(places < kept, scores - reference, NOTHING))
            held += tl.sum(weights.to(tl.float64), axis=0)
    tokens = tl.load(cuts_ptr + of_head * CUTS + CUT_TOKENS)
    if wanted > taken:
        lists = of_kv_head * clusters
        before_lost = _before_first_lost(
            scores_ptr + of_head * clusters, cuts_ptr + of_head * CUTS, steps_ptr + lists, listed_ptr + lists,
            needed_ptr + lists, places_ptr + lists, tl.load(placed_ptr + of_kv_head), taken,
        )  # fmt: skip
        tokens = tl.minimum(tokens, before_lost)
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
            table_ptr = span_table(table_ptr, sinks, span, page_size)
            for begin in range(0, tokens - start, _TOKEN_TILE):
                ranks = begin + tl.arange(0, _TOKEN_TILE)
                weights = member_weights(
                    queries_ptr, keys_ptr, firsts_ptr, offsets_ptr, table_ptr, query, address, last, ranks,
                    ranks < tokens - start, kv_head, reference, scale_log2, slot_stride, capacity, head_dim, dim_block,
                    of_span, span, page_size,
                )  # fmt: skip
                held += tl.sum(weights, axis=0)
    tl.store(head_shares_ptr + of_head, held / tl.load(fits_ptr + FIT_TOTAL))


@triton.jit  # type: ignore[untyped-decorator]
def _before_first_lost(
    scores_ptr: tl.tensor,
    cuts_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    needed_ptr: tl.tensor,
    places_ptr: tl.tensor,
    listed: tl.tensor,
    taken: tl.tensor,
) -> tl.tensor:
    """Return how many tokens of a query head's list come before the first that it needs and the cap cuts.

    Args:
        scores_ptr: the query head's.
        cuts_ptr: the query head's.
        steps_ptr: the KV head's.
        listed_ptr: the KV head's.
        needed_ptr: the KV head's.
        places_ptr: the KV head's.
        listed: scalar; clusters that were put in order.
        taken: scalar; tokens of them that the cap leaves.

    Returns:
        int32 scalar; as much as the query head needs, or more, where nothing of that is cut.
    """
    cut_key, cut_last = tl.load(cuts_ptr + CUT_KEY), tl.load(cuts_ptr + CUT_LAST)
    first = listed * 0 + LOWEST
    for begin in range(0, listed, _LISTED):
        keys, needed, kept = _kept(
            scores_ptr, steps_ptr, listed_ptr, needed_ptr, places_ptr, cut_key, cut_last, begin, listed, taken
        )
        # Only of the last cluster in its list the group may need more than the query head does. There it may look as
        # if some were lost: what comes before is as much as the query head needs nevertheless.
        first = tl.maximum(first, tl.max(tl.where(kept < needed, keys, LOWEST), axis=0))
    before = listed * 0
    for begin in range(0, listed, _LISTED):
        keys, _, kept = _kept(
            scores_ptr, steps_ptr, listed_ptr, needed_ptr, places_ptr, cut_key, cut_last, begin, listed, taken
        )
        before += tl.sum(tl.where(keys >= first, kept, 0), axis=0)
    return before


@triton.jit  # type: ignore[untyped-decorator]
def _kept(
    scores_ptr: tl.tensor,
    steps_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    needed_ptr: tl.tensor,
    places_ptr: tl.tensor,
    cut_key: tl.tensor,
    cut_last: tl.tensor,
    begin: tl.tensor,
    listed: tl.tensor,
    taken: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return of some clusters the unique keys, how much the group needs of them, and how much of that is kept.

    All int32; of clusters of which the query head needs nothing, nothing is needed and kept.
    """
    placed = begin + tl.arange(0, _LISTED)
    at = tl.load(steps_ptr + placed, mask=placed < listed, other=0) // _STEPS
    number = tl.load(listed_ptr + at, mask=placed < listed, other=0)
    needed = tl.load(needed_ptr + at, mask=placed < listed, other=0)
    before = tl.load(places_ptr + at, mask=placed < listed, other=0)
    score = tl.load(scores_ptr + number, mask=placed < listed, other=0.0)
    is_needed = (placed < listed) & through(ordered(score), number, cut_key, cut_last)
    needed = tl.where(is_needed, needed, 0)
    return unique_keys(score, number), needed, tl.minimum(tl.maximum(taken - before, 0), needed)
