"""What a cap leaves of the share of the mass (``selection``).

A cap keeps the front of the order in which clusters are read. Of a query head's own list that leaves what comes before
the first token lost, and the curve says what that holds. Keys that were read for the fit are looked at once more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.kernel_arguments import Heads
from winnow_kernels.policies.tactic.gpu.contexts import (
    NOTHING,
    is_idle,
    kept_positions,
    keys_at,
    row_at,
    table_of,
    through,
    united,
)
from winnow_kernels.policies.tactic.gpu.fit import Curve, curve_mass, head_query, member_weights
from winnow_kernels.policies.tactic.gpu.search import number_of, unique_keys
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
    RANK_KNOWN,
    RANK_KNOWN_CLUSTERS,
    RANKS,
    SLICE,
    Attention,
    Contexts,
    Fitted,
    Listed,
    Ordered,
    Ranked,
    Scored,
)
from winnow_kernels.policies.tactic.reference import SHARE_STEPS
from winnow_kernels.selection.gpu_slots import slots_at
from winnow_kernels.selection.gpu_threshold import LOWEST, counted, counted_threshold, ordered

_SLICE = tl.constexpr(SLICE)
_STEPS = tl.constexpr(SHARE_STEPS)
_TOKEN_TILE = tl.constexpr(64)
# Listed clusters that are looked at together.
_LISTED = tl.constexpr(1024)


@triton.jit  # type: ignore[untyped-decorator]
def capped_share_kernel(
    attention: Attention,
    heads: Heads,
    contexts: Contexts,
    scored: Scored,
    ranked: Ranked,
    fitted: Fitted,
    listed: Listed,
    order: Ordered,
) -> None:
    """State the share of one query head that a cap leaves."""
    head = tl.program_id(0)
    row = row_at(contexts, tl.program_id(1))
    if is_idle(row) | (row.cap == 0):
        return
    kv_head = head // heads.group
    of_kv_head = row.number.to(tl.int64) * heads.kv_heads + kv_head
    totals_ptr = listed.totals + of_kv_head * (scored.clusters // _SLICE)
    _totals, kept, taken, wanted = united(totals_ptr, row, scored.clusters)
    in_no_cluster = row.length - row.clustered
    if (taken < 0) | (kept + taken == in_no_cluster + wanted):
        return
    of_head = row.number.to(tl.int64) * (heads.kv_heads * heads.group) + head
    scores_ptr = scored.scores + of_head * scored.clusters
    fits_ptr = fitted.fits + of_head * FITS
    reference = tl.load(fits_ptr + FIT_REFERENCE).to(tl.float32)

    held = tl.load(fits_ptr + FIT_OUTSIDE)
    if kept < in_no_cluster:
        query = head_query(attention.queries, heads, row, head)
        held = held * 0
        for begin in range(0, kept, _TOKEN_TILE):
            places = begin + tl.arange(0, _TOKEN_TILE)
            positions = kept_positions(places, row)
            slots = slots_at(table_of(contexts.rows, row), positions, places < kept, contexts.rows.page_size)
            keys = keys_at(attention.keys, kv_head, slots, places < kept, heads).to(tl.float32)
            scores = tl.sum(keys * query[None, :], axis=1) * attention.scale_log2
            weights = tl.exp2(tl.where(places < kept, scores - reference, NOTHING))
            held += tl.sum(weights.to(tl.float64), axis=0)
    tokens = tl.load(fitted.cuts + of_head * CUTS + CUT_TOKENS)
    if wanted > taken:
        tokens = tl.minimum(tokens, before_first_lost(scored, fitted, listed, order, of_head, of_kv_head, taken))
    if tokens > 0:
        known = tl.load(ranked.ranks + of_head * RANKS + RANK_KNOWN)
        if tokens >= known:
            curve = Curve(tl.load(fits_ptr + FIT_A), tl.load(fits_ptr + FIT_B))
            end = tl.load(fits_ptr + FIT_END).to(tl.int32)
            held += tl.load(fits_ptr + FIT_FIRST) + curve_mass(curve, known, tl.minimum(tokens, end).to(tl.float64))
        else:
            known_clusters = tl.load(ranked.ranks + of_head * RANKS + RANK_KNOWN_CLUSTERS)
            place = tl.arange(0, ranked.known_clusters)
            is_known = place < known_clusters
            numbers = tl.load(ranked.known + of_head * ranked.known_clusters + place, mask=is_known, other=0)
            keys = unique_keys(tl.load(scores_ptr + numbers, mask=is_known, other=0.0), numbers)
            keys = tl.where(is_known, keys, LOWEST)
            sizes = tl.load(scored.sizes + of_kv_head * scored.clusters + numbers, mask=is_known, other=0)
            key, _, reached = counted_threshold(keys, tl.where(is_known, counted(sizes), 0), tokens, tokens < 0)
            rest = tokens - (reached - tl.sum(tl.where(keys == key, sizes, 0), axis=0))
            masses = tl.load(ranked.masses + of_head * scored.clusters + numbers, mask=keys > key, other=NOTHING)
            held += tl.sum(tl.exp2(masses - reference).to(tl.float64), axis=0)
            for begin in range(0, rest, _TOKEN_TILE):
                ranks = begin + tl.arange(0, _TOKEN_TILE)
                weights = member_weights(
                    attention, heads, contexts, row, head, number_of(key), ranks, ranks < rest, reference
                )
                held += tl.sum(weights, axis=0)
    tl.store(fitted.shares + of_head, held / tl.load(fits_ptr + FIT_TOTAL))


@triton.jit  # type: ignore[untyped-decorator]
def before_first_lost(
    scored: Scored,
    fitted: Fitted,
    listed: Listed,
    order: Ordered,
    of_head: tl.tensor,
    of_kv_head: tl.tensor,
    taken: tl.tensor,
) -> tl.tensor:
    """Return how many tokens of a query head's list come before the first that it needs and the cap cuts.

    Args:
        scored: clusters.
        fitted: what the query head takes.
        listed: what its group does.
        order: after ``place_kernel``.
        of_head: int64 scalar; number of the query head, through all rows.
        of_kv_head: int64 scalar; that of its KV head.
        taken: scalar; tokens of clusters that the cap leaves.

    Returns:
        int32 scalar; as much as the query head needs, or more, where nothing of that is cut.
    """
    placed = tl.load(order.placed + of_kv_head)
    cuts_ptr = fitted.cuts + of_head * CUTS
    cut_key, cut_last = tl.load(cuts_ptr + CUT_KEY), tl.load(cuts_ptr + CUT_LAST)
    first = placed * 0 + LOWEST
    for begin in range(0, placed, _LISTED):
        keys, needed, kept = _kept(scored, listed, order, of_head, of_kv_head, cut_key, cut_last, begin, placed, taken)
        # Only of the last cluster in its list the group may need more than the query head does. There it may look as
        # if some were lost: what comes before is as much as the query head needs nevertheless.
        first = tl.maximum(first, tl.max(tl.where(kept < needed, keys, LOWEST), axis=0))
    before = placed * 0
    for begin in range(0, placed, _LISTED):
        keys, _, kept = _kept(scored, listed, order, of_head, of_kv_head, cut_key, cut_last, begin, placed, taken)
        before += tl.sum(tl.where(keys >= first, kept, 0), axis=0)
    return before


@triton.jit  # type: ignore[untyped-decorator]
def _kept(
    scored: Scored,
    listed: Listed,
    order: Ordered,
    of_head: tl.tensor,
    of_kv_head: tl.tensor,
    cut_key: tl.tensor,
    cut_last: tl.tensor,
    begin: tl.tensor,
    placed: tl.tensor,
    taken: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return of some clusters the unique keys, how much the group needs of them, and how much of that is kept.

    All int32; of clusters of which the query head needs nothing, nothing is needed and kept.
    """
    place = begin + tl.arange(0, _LISTED)
    is_placed = place < placed
    lists = of_kv_head * scored.clusters
    at = lists + tl.load(order.steps + lists + place, mask=is_placed, other=0) // _STEPS
    number = tl.load(listed.numbers + at, mask=is_placed, other=0)
    needed = tl.load(listed.needed + at, mask=is_placed, other=0)
    before = tl.load(order.places + at, mask=is_placed, other=0)
    score = tl.load(scored.scores + of_head * scored.clusters + number, mask=is_placed, other=0.0)
    is_needed = is_placed & through(ordered(score), number, cut_key, cut_last)
    needed = tl.where(is_needed, needed, 0)
    return unique_keys(score, number), needed, tl.minimum(tl.maximum(taken - before, 0), needed)
