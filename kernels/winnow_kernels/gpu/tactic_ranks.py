"""What of a query head's list of clusters is looked at, found without sorting (``winnow_kernels.gpu.tactic``)."""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.gpu.tactic_state import (
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
    addresses_of,
    count_read,
    is_idle,
    through,
    tied,
)
from winnow_kernels.gpu.threshold import HIGHEST, LOWEST, count_of, counted, counted_threshold, ordered, weight_of
from winnow_kernels.kmeans import CLUSTER_SIZE
from winnow_kernels.tactic import EXACT_SHARE, LISTED_SHARE, WINDOW_CENTRES, WINDOW_CLUSTERS

_EXACT_SHARE = tl.constexpr(EXACT_SHARE)
_LISTED_SHARE = tl.constexpr(LISTED_SHARE)
_NEAR, _FAR = (tl.constexpr(centre) for centre in WINDOW_CENTRES)
_WINDOW = tl.constexpr(WINDOW_CLUSTERS)
_SAMPLED = tl.constexpr(CLUSTER_SIZE)
# Three running counts in one number: of both windows' clusters, at most 4 each, and of those with exact weights.
_COUNT_FAR = tl.constexpr(1 << 3)
_COUNT_KNOWN = tl.constexpr(1 << 6)


@triton.jit  # type: ignore[untyped-decorator]
def rank_kernel(  # noqa: PLR0915 - what is found on the way stays in registers
    scores_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    clustered_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    caps_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    known_ptr: tl.tensor,
    windows_ptr: tl.tensor,
    entries_stride: tl.tensor,
    capacity: tl.tensor,
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
    # One at a time in each thread: such that searches, running sums and scattered stores have one layout, and no block
    # has to change places. What is read here lies in the L2 cache.
    numbers = tl.max_contiguous(tl.arange(0, block), 1)
    present = numbers < count
    of_head = row.to(tl.int64) * query_heads + head
    keys = ordered(tl.load(scores_ptr + of_head * clusters + numbers, mask=present, other=0.0))
    keys = tl.where(present, keys, LOWEST)
    addresses = addresses_of(entries_ptr + row * entries_stride, numbers, present, head // group, capacity, of_span)
    packed = tl.load(sizes_ptr + addresses, mask=present, other=0).to(tl.int32)
    packed = tl.where(present, counted(packed), 0)
    # Nothing but keys and packed sizes stays in registers.
    ranks_ptr += of_head * RANKS

    # Exact weights: of a share of the tokens, if so many are in the clusters listed, else of all in these.
    listed = tl.maximum(tl.ceil(count.to(tl.float64) * _LISTED_SHARE).to(tl.int32), 1)
    wanted = tl.ceil(tokens.to(tl.float64) * _EXACT_SHARE).to(tl.int32)
    key, ranked, reached = counted_threshold(keys, packed, wanted, wanted < 0)
    last, start = tied(keys, weight_of(packed), numbers, key, reached, wanted)
    if ranked > listed:
        ranked = tl.sum((through(keys, numbers, key, last) & (packed > 0)).to(tl.int32), axis=0)
    known = wanted
    if ranked > listed:
        key, ranked, reached = counted_threshold(keys, packed, listed, listed > 0)
        last, _ = tied(keys, count_of(packed), numbers, key, ranked, listed)
        known = tl.sum(tl.where(through(keys, numbers, key, last), weight_of(packed), 0), axis=0)
        start = known - tl.sum(tl.where(numbers == last, weight_of(packed), 0), axis=0)
    tl.store(ranks_ptr + RANK_KNOWN, known)
    tl.store(ranks_ptr + RANK_KNOWN_KEY, key)
    tl.store(ranks_ptr + RANK_KNOWN_LAST, last)
    tl.store(ranks_ptr + RANK_KNOWN_START, start)

    # Half a window is a whole number of clusters, so that it may be taken away after rounding.
    near = tl.maximum(tl.ceil(count.to(tl.float64) * _NEAR).to(tl.int32) - _WINDOW // 2, 0)
    far_end = tl.minimum(tl.ceil(count.to(tl.float64) * _FAR).to(tl.int32) - _WINDOW // 2 + _WINDOW, count)
    edges = tl.arange(0, 4)
    ends = tl.where(edges < 2, near, far_end - _WINDOW) + tl.where(edges % 2 == 1, _WINDOW, 0)
    edge_keys, edge_lasts = _edges(keys, packed, numbers, ends)
    before_near, in_near = _window(keys, packed, numbers, edge_keys, edge_lasts, edges, 0)
    before_far, in_far = _window(keys, packed, numbers, edge_keys, edge_lasts, edges, 2)
    tl.store(ranks_ptr + RANK_NEAR_BEFORE, before_near)
    tl.store(ranks_ptr + RANK_NEAR_TOKENS, tl.sum(tl.where(in_near, weight_of(packed), 0), axis=0))
    tl.store(ranks_ptr + RANK_FAR_BEFORE, before_far)
    tl.store(ranks_ptr + RANK_FAR_TOKENS, tl.sum(tl.where(in_far, weight_of(packed), 0), axis=0))
    sampled = tl.minimum(weight_of(packed), _SAMPLED)
    sampled = tl.sum(tl.where(in_near, sampled, 0) + tl.where(in_far, sampled, 0), axis=0)
    count_read(counts_ptr, row, (known + sampled) * member_bytes)

    is_known = through(keys, numbers, key, last) & (weight_of(packed) > 0)
    marks = tl.where(in_near, 1, 0) + tl.where(in_far, _COUNT_FAR, 0) + tl.where(is_known, _COUNT_KNOWN, 0)
    running = tl.cumsum(marks, axis=0)
    windows_ptr += of_head * (2 * _WINDOW)
    tl.store(windows_ptr + running % _COUNT_FAR - 1, numbers, mask=in_near)
    tl.store(windows_ptr + _WINDOW + running // _COUNT_FAR % _COUNT_FAR - 1, numbers, mask=in_far)
    tl.store(known_ptr + of_head * known_clusters + running // _COUNT_KNOWN - 1, numbers, mask=is_known)
    tl.store(ranks_ptr + RANK_KNOWN_CLUSTERS, tl.sum(is_known.to(tl.int32), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _edges(keys: tl.tensor, packed: tl.tensor, numbers: tl.tensor, ends: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the keys and numbers of the clusters up to which the first ``ends``, int32 [4], come; of none for 0."""
    rows_of_keys = keys[None, :] + tl.zeros((4, 1), tl.int32)
    rows_packed = packed[None, :] + tl.zeros((4, 1), tl.int32)
    wanted = tl.maximum(ends, 1)
    found, reached, _ = counted_threshold(rows_of_keys, rows_packed, wanted, ends >= 0)
    lasts = tl.where(reached > wanted, tl.max(numbers, axis=0), HIGHEST)
    if tl.max(reached - wanted, axis=0) > 0:
        # Several clusters have the same score, and only the first of them are wanted.
        is_tied = (rows_of_keys == found[:, None]) & (rows_packed > 0)
        missing = wanted - (reached - tl.sum(is_tied.to(tl.int32), axis=1))
        low = tl.where(reached > wanted, -1, HIGHEST - 1)
        while tl.max((low + 1 < lasts).to(tl.int32), axis=0) > 0:
            middle = low + (lasts - low) // 2
            enough = tl.sum((is_tied & (numbers[None, :] <= middle[:, None])).to(tl.int32), axis=1) >= missing
            searching = low + 1 < lasts
            lasts = tl.where(searching & enough, middle, lasts)
            low = tl.where(searching & (enough == 0), middle, low)
    return tl.where(ends == 0, HIGHEST, found), tl.where(ends == 0, -1, lasts)


@triton.jit  # type: ignore[untyped-decorator]
def _window(
    keys: tl.tensor,
    packed: tl.tensor,
    numbers: tl.tensor,
    edge_keys: tl.tensor,
    edge_lasts: tl.tensor,
    edges: tl.tensor,
    edge: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return how many tokens come before the window whose edges are ``edge`` and the next, and what is in it."""
    start = tl.sum(tl.where(edges == edge, edge_keys, 0), axis=0)
    start_last = tl.sum(tl.where(edges == edge, edge_lasts, 0), axis=0)
    end = tl.sum(tl.where(edges == edge + 1, edge_keys, 0), axis=0)
    end_last = tl.sum(tl.where(edges == edge + 1, edge_lasts, 0), axis=0)
    before = through(keys, numbers, start, start_last) & (packed > 0)
    tokens = tl.sum(tl.where(before, weight_of(packed), 0), axis=0)
    return tokens, through(keys, numbers, end, end_last) & (packed > 0) & (before == 0)
