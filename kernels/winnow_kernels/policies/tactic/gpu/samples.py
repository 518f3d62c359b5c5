"""Exact weights of members of clusters (``selection``)."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.indexes.kmeans import CLUSTER_SIZE
from winnow_kernels.kernel_arguments import Heads
from winnow_kernels.policies.tactic.gpu.contexts import (
    GROUP_BLOCK,
    NOTHING,
    group_queries,
    is_idle,
    keys_at,
    member_slots,
    offsets_of,
    places_of,
    row_at,
    span_table,
    through,
)
from winnow_kernels.policies.tactic.gpu.state import (
    RANK_KNOWN,
    RANK_KNOWN_KEY,
    RANK_KNOWN_LAST,
    RANK_KNOWN_START,
    RANKS,
    Attention,
    Contexts,
    Listed,
    Ranked,
    Scored,
)
from winnow_kernels.policies.tactic.reference import WINDOW_CLUSTERS
from winnow_kernels.selection.gpu_threshold import count_of, counted, ordered, weight_of

SLICE: Final = 128
"""Clusters of a row that one program looks through for a KV head; they are dealt out by eights in turn."""

_SAMPLED = tl.constexpr(CLUSTER_SIZE)
_WINDOW = tl.constexpr(WINDOW_CLUSTERS)
_SLICE = tl.constexpr(SLICE)
_TOGETHER = tl.constexpr(8)
# So many clusters, and so many of their members, are weighed at a time; of a window all that are sampled.
_LISTED = tl.constexpr(16)
_TOKENS = tl.constexpr(CLUSTER_SIZE * WINDOW_CLUSTERS)
# A cluster's number, and above it a bit for each query head.
_NUMBER_BITS = tl.constexpr(14)
_NUMBER_MASK = tl.constexpr(2**14 - 1)


@triton.jit  # type: ignore[untyped-decorator]
def sample_kernel(  # noqa: PLR0915 - its two halves share most of what they read
    attention: Attention,
    heads: Heads,
    contexts: Contexts,
    scored: Scored,
    ranked: Ranked,
    listed: Listed,
) -> None:
    """Weigh one split's clusters with exact weights, or one window of a query head.

    A cluster that several query heads of the group look at is read once. The first ``splits`` programs of a row and KV
    head have the clusters with exact weights, the others each a window.
    """
    part, kv_head = tl.program_id(0), tl.program_id(1)
    keys, scale_log2 = attention.keys, attention.scale_log2
    row = row_at(contexts, tl.program_id(2))
    if is_idle(row) | (row.clustered == 0):
        return
    splits: tl.constexpr = scored.clusters // _SLICE
    of_kv_head = row.number.to(tl.int64) * heads.kv_heads + kv_head
    of_group = of_kv_head * heads.group
    queries = group_queries(attention.queries, row, kv_head, heads)
    table_ptr = span_table(contexts, row)
    sizes_ptr = scored.sizes + of_kv_head * scored.clusters
    firsts_ptr = scored.firsts + of_kv_head * scored.clusters
    offsets_ptr = offsets_of(contexts.tables, kv_head)
    members, tokens = tl.arange(0, GROUP_BLOCK), tl.arange(0, _TOKENS)

    if part >= splits:
        window = part - splits
        of_head = of_group + window // 2
        of_window = of_head * (2 * _WINDOW) + window % 2 * _WINDOW
        numbers = tl.load(ranked.windows + of_window + tokens // _SAMPLED)
        sizes = tl.load(sizes_ptr + numbers)
        first = tl.load(firsts_ptr + numbers)
        is_member = tokens % _SAMPLED < sizes
        slots = member_slots(contexts, table_ptr, offsets_ptr + first + tokens % _SAMPLED, numbers, is_member)
        sampled = keys_at(keys, kv_head, slots, is_member, heads)
        of_all = tl.dot(queries, tl.trans(sampled), input_precision="ieee") * scale_log2
        scores = tl.sum(tl.where((members == window // 2)[:, None], of_all, 0.0), axis=0)
        scores = tl.reshape(tl.where(is_member, scores, NOTHING), (_WINDOW, _SAMPLED))
        largest = tl.max(scores, axis=1)
        weights = tl.where(tl.reshape(is_member, (_WINDOW, _SAMPLED)), tl.exp2(scores - largest[:, None]), 0.0)
        # The sample stands for all members.
        size = tl.max(tl.reshape(sizes, (_WINDOW, _SAMPLED)), axis=1).to(tl.float32)
        mass = tl.sum(weights, axis=1) * (size / tl.minimum(tl.maximum(size, 1.0), _SAMPLED))
        mass = tl.where(size > 0, largest + tl.log2(tl.maximum(mass, 1e-30)), NOTHING)
        tl.store(ranked.window_masses + of_window + tl.arange(0, _WINDOW), mass)
        return

    places = tl.arange(0, _SLICE)
    numbers = (places // _TOGETHER * splits + part) * _TOGETHER + places % _TOGETHER
    present = numbers < row.clusters
    is_head = members < heads.group
    of_heads = of_group + members
    last = tl.load(ranked.ranks + of_heads * RANKS + RANK_KNOWN_LAST, mask=is_head, other=-1)
    of_last = tl.load(ranked.ranks + of_heads * RANKS + RANK_KNOWN, mask=is_head, other=0)
    of_last -= tl.load(ranked.ranks + of_heads * RANKS + RANK_KNOWN_START, mask=is_head, other=0)
    sizes = tl.load(sizes_ptr + numbers, mask=present, other=0)
    firsts = tl.load(firsts_ptr + numbers, mask=present, other=0)
    # Of its last cluster a query head may look at the first members alone: up to here in the head's offsets.
    stop = of_last + tl.load(firsts_ptr + last, mask=last >= 0, other=0)
    # One bit for each query head.
    marks = tl.zeros((_SLICE,), tl.int32)
    for head in tl.static_range(heads.group):
        centre = tl.load(scored.scores + (of_group + head) * scored.clusters + numbers, mask=present, other=0.0)
        known_key = tl.load(ranked.ranks + (of_group + head) * RANKS + RANK_KNOWN_KEY)
        known_last = tl.load(ranked.ranks + (of_group + head) * RANKS + RANK_KNOWN_LAST)
        is_known = present & through(ordered(centre), numbers, known_key, known_last)
        marks |= tl.where(is_known, 1 << head, 0)
    is_wanted = marks != 0
    packed = tl.where(is_wanted, counted(sizes), 0)
    running = tl.cumsum(packed, axis=0)
    all_packed = tl.sum(packed, axis=0)
    found, total = count_of(all_packed), weight_of(all_packed)
    of_slice = of_kv_head * scored.clusters + part * _SLICE
    numbers_ptr = listed.numbers + of_slice
    firsts_ptr = listed.firsts + of_slice
    starts_ptr = listed.starts + of_slice
    list_place = count_of(running) - 1
    start = weight_of(running) - sizes
    tl.store(numbers_ptr + list_place, numbers | (marks << _NUMBER_BITS), mask=is_wanted)
    tl.store(firsts_ptr + list_place, firsts - start, mask=is_wanted)
    tl.store(starts_ptr + list_place, start, mask=is_wanted)
    tl.debug_barrier()

    some = tl.arange(0, _LISTED)
    for begin in range(0, found, _LISTED):
        # Members of so many clusters in a row.
        token = tl.load(starts_ptr + begin)
        end = tl.load(starts_ptr + begin + _LISTED, mask=begin + _LISTED < found, other=0)
        end = tl.where(begin + _LISTED < found, end, total)
        largest = tl.full((GROUP_BLOCK,), NOTHING, tl.float32)
        mass = tl.zeros((GROUP_BLOCK, _LISTED), tl.float32)
        some_listed = Listed(listed.totals, numbers_ptr + begin, firsts_ptr + begin, starts_ptr + begin, listed.needed)
        place, marked, in_offsets, slots = _members(
            contexts, some_listed, offsets_ptr, table_ptr, token + tokens, end, found - begin
        )
        while token < end:
            weighed = keys_at(keys, kv_head, slots, token + tokens < end, heads)
            token += _TOKENS
            # While these keys are on their way, the next are looked up.
            next_place, next_marked, next_in_offsets, next_slots = _members(
                contexts, some_listed, offsets_ptr, table_ptr, token + tokens, end, found - begin
            )
            number = marked & _NUMBER_MASK
            scores = tl.dot(queries, tl.trans(weighed), input_precision="ieee") * scale_log2
            counts = ((marked >> _NUMBER_BITS)[None, :] >> members[:, None]) & 1 != 0
            counts = counts & ((number[None, :] != last[:, None]) | (in_offsets[None, :] < stop[:, None]))
            scores = tl.where(counts, scores, NOTHING)
            above = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.where(counts, tl.exp2(scores - above[:, None]), 0.0)
            # Sums by cluster.
            is_of = (place[:, None] == some[None, :]).to(tl.float32)
            mass = mass * tl.exp2(largest - above)[:, None] + tl.dot(weights, is_of, input_precision="ieee")
            largest = above
            place, marked, in_offsets, slots = next_place, next_marked, next_in_offsets, next_slots
        masses = tl.where(mass > 0, largest[:, None] + tl.log2(tl.maximum(mass, 1e-38)), NOTHING)
        summed = tl.load(numbers_ptr + begin + some, mask=begin + some < found, other=0)
        tl.store(
            ranked.masses + of_heads[:, None] * scored.clusters + (summed & _NUMBER_MASK)[None, :],
            masses,
            mask=((summed >> _NUMBER_BITS)[None, :] >> members[:, None]) & 1 != 0,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _members(
    contexts: Contexts,
    listed: Listed,
    offsets_ptr: tl.tensor,
    table_ptr: tl.tensor,
    tokens: tl.tensor,
    end: tl.tensor,
    found: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Find the ``tokens``, int32 [n], before ``end``, counted through the first ``_LISTED`` clusters of a list.

    Returns:
        int32 [n] each: which cluster of the list, what is listed of it, places in the head's offsets, and slots.
    """
    is_member = tokens < end
    place = places_of(listed.starts, tokens, found, _LISTED)
    marked = tl.load(listed.numbers + place, mask=is_member, other=0)
    in_offsets = tokens + tl.load(listed.firsts + place, mask=is_member, other=0)
    slots = member_slots(contexts, table_ptr, offsets_ptr + in_offsets, marked & _NUMBER_MASK, is_member)
    return place, marked, in_offsets, slots
