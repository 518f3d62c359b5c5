"""Exact weights of members of clusters (``winnow_kernels.gpu.tactic``).

A program looks up the members of a dozen clusters all at once, with five loads that wait for each other, and then reads
their keys tile by tile, some tiles on their way together. Scores go to the L2 cache and come back cluster by cluster.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.gpu.tactic_state import (
    GROUP_BLOCK,
    NOTHING,
    RANK_KNOWN,
    RANK_KNOWN_KEY,
    RANK_KNOWN_LAST,
    RANK_KNOWN_START,
    RANKS,
    SAMPLED_TOKENS,
    group_queries,
    is_idle,
    keys_at,
    places_of,
    slots_at,
    through,
)
from winnow_kernels.gpu.threshold import count_of, counted, ordered, weight_of
from winnow_kernels.kmeans import CLUSTER_SIZE
from winnow_kernels.tactic import WINDOW_CLUSTERS

STAGES: Final = 5
"""Of the loop over tiles of keys."""

_SAMPLED = tl.constexpr(CLUSTER_SIZE)
_WINDOWS = tl.constexpr(2 * WINDOW_CLUSTERS)
_TOGETHER = tl.constexpr(8)
# So many clusters are looked up together, as many of their members as there is room for; keys come in tiles.
_LISTED = tl.constexpr(16)
_LOOKED_UP = tl.constexpr(SAMPLED_TOKENS)
_TILE = tl.constexpr(64)
_STAGES = tl.constexpr(STAGES)
# Members of each cluster that are added up at a time, for all query heads of a group together.
_ADDED = tl.constexpr(64)
# A cluster's number, and above it a bit for each query head.
_NUMBER_BITS = tl.constexpr(14)
_NUMBER_MASK = tl.constexpr(2**14 - 1)


@triton.jit  # type: ignore[untyped-decorator]
def sample_kernel(  # noqa: PLR0915 - its two halves share most of what they read
    queries_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    cluster_sizes_ptr: tl.tensor,
    cluster_firsts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    clustered_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    caps_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    windows_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    window_masses_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    list_firsts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    sampled_slots_ptr: tl.tensor,
    sampled_scores_ptr: tl.tensor,
    scale_log2: tl.tensor,
    query_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    capacity: tl.tensor,
    clusters: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    group_block: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    page_size: tl.constexpr,
    span: tl.constexpr,
    of_span: tl.constexpr,
    splits: tl.constexpr,
) -> None:
    """Weigh one split's clusters with exact weights, or both windows of a query head.

    A cluster that several query heads of the group look at is read once. The first ``splits`` programs of a row and KV
    head have the clusters with exact weights, dealt out by eights in turn, the others each the windows of a query head.
    """
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share, cap = tl.load(shares_ptr + row), tl.load(caps_ptr + row)
    length, clustered = tl.load(lengths_ptr + row), tl.load(clustered_ptr + row)
    if is_idle(share, length, clustered, cap) | (clustered == 0):
        return
    count = clustered // span * of_span
    of_kv_head = row.to(tl.int64) * kv_heads + kv_head
    of_group = of_kv_head * group
    keys_ptr += kv_head * head_stride
    table_ptr += row * table_stride
    cluster_sizes_ptr += of_kv_head * clusters
    cluster_firsts_ptr += of_kv_head * clusters
    offsets_ptr += kv_head.to(tl.int64) * capacity * span

    if part >= splits:
        of_head = of_group + part - splits
        query_ptr = queries_ptr + row.to(tl.int64) * query_stride + (kv_head * group + part - splits) * head_dim
        dims = tl.arange(0, dim_block)
        query = tl.load(query_ptr + dims, mask=dims < head_dim, other=0.0).to(tl.float32)
        samples = tl.arange(0, _WINDOWS * _SAMPLED)
        numbers = tl.load(windows_ptr + of_head * _WINDOWS + samples // _SAMPLED)
        sizes = tl.load(cluster_sizes_ptr + numbers)
        first = tl.load(cluster_firsts_ptr + numbers)
        is_member = samples % _SAMPLED < sizes
        offset = tl.load(offsets_ptr + first + samples % _SAMPLED, mask=is_member, other=0).to(tl.int32)
        slots = slots_at(table_ptr, numbers // of_span * span + offset, is_member, page_size)
        keys = keys_at(keys_ptr, slots, is_member, slot_stride, head_dim, dim_block)
        scores = tl.sum(keys.to(tl.float32) * query[None, :], axis=1) * scale_log2
        scores = tl.reshape(tl.where(is_member, scores, NOTHING), (_WINDOWS, _SAMPLED))
        largest = tl.max(scores, axis=1)
        weights = tl.where(tl.reshape(is_member, (_WINDOWS, _SAMPLED)), tl.exp2(scores - largest[:, None]), 0.0)
        # The sample stands for all members.
        size = tl.max(tl.reshape(sizes, (_WINDOWS, _SAMPLED)), axis=1).to(tl.float32)
        mass = tl.sum(weights, axis=1) * (size / tl.minimum(tl.maximum(size, 1.0), _SAMPLED))
        mass = tl.where(size > 0, largest + tl.log2(tl.maximum(mass, 1e-30)), NOTHING)
        tl.store(window_masses_ptr + of_head * _WINDOWS + tl.arange(0, _WINDOWS), mass)
        return

    of_split: tl.constexpr = clusters // splits
    places = tl.arange(0, of_split)
    numbers = (places // _TOGETHER * splits + part) * _TOGETHER + places % _TOGETHER
    present = numbers < count
    heads = tl.arange(0, group_block)
    is_head = heads < group
    of_heads = of_group + heads
    last = tl.load(ranks_ptr + of_heads * RANKS + RANK_KNOWN_LAST, mask=is_head, other=-1)
    of_last = tl.load(ranks_ptr + of_heads * RANKS + RANK_KNOWN, mask=is_head, other=0)
    of_last -= tl.load(ranks_ptr + of_heads * RANKS + RANK_KNOWN_START, mask=is_head, other=0)
    sizes = tl.load(cluster_sizes_ptr + numbers, mask=present, other=0)
    firsts = tl.load(cluster_firsts_ptr + numbers, mask=present, other=0)
    # Of its last cluster a query head may look at the first members alone: up to here in the head's offsets.
    stop = of_last + tl.load(cluster_firsts_ptr + last, mask=last >= 0, other=0)
    # One bit for each query head.
    marks = tl.zeros((of_split,), tl.int32)
    for head in tl.static_range(group):
        centre = tl.load(scores_ptr + (of_group + head) * clusters + numbers, mask=present, other=0.0)
        known_key = tl.load(ranks_ptr + (of_group + head) * RANKS + RANK_KNOWN_KEY)
        known_last = tl.load(ranks_ptr + (of_group + head) * RANKS + RANK_KNOWN_LAST)
        is_known = present & through(ordered(centre), numbers, known_key, known_last)
        marks |= tl.where(is_known, 1 << head, 0)
    is_wanted = marks != 0
    packed = tl.where(is_wanted, counted(sizes), 0)
    running = tl.cumsum(packed, axis=0)
    all_packed = tl.sum(packed, axis=0)
    found, total = count_of(all_packed), weight_of(all_packed)
    of_slice = of_kv_head * clusters + part * of_split
    listed_ptr += of_slice
    list_firsts_ptr += of_slice
    starts_ptr += of_slice
    list_place = count_of(running) - 1
    start = weight_of(running) - sizes
    tl.store(listed_ptr + list_place, numbers | (marks << _NUMBER_BITS), mask=is_wanted)
    tl.store(list_firsts_ptr + list_place, firsts - start, mask=is_wanted)
    tl.store(starts_ptr + list_place, start, mask=is_wanted)
    tl.debug_barrier()

    queries = group_queries(queries_ptr, row, kv_head, query_stride, group, head_dim, dim_block)
    rows_of_tile = tl.arange(0, GROUP_BLOCK)
    sampled_slots_ptr += (of_kv_head * splits + part) * _LOOKED_UP
    sampled_scores_ptr += (of_kv_head * splits + part) * (group * _LOOKED_UP)
    of_round: tl.constexpr = min(16, _ADDED // group_block)
    some, added = tl.arange(0, _LISTED), tl.arange(0, of_round)
    for begin in range(0, found, _LISTED):
        largest = tl.full((group_block, _LISTED), NOTHING, tl.float32)
        mass = tl.zeros((group_block, _LISTED), tl.float32)
        end = tl.load(starts_ptr + begin + _LISTED, mask=begin + _LISTED < found, other=0)
        end = tl.where(begin + _LISTED < found, end, total)
        for base in range(tl.load(starts_ptr + begin), end, _LOOKED_UP):
            tokens = tl.minimum(end - base, _LOOKED_UP)
            _look_up(
                listed_ptr + begin, list_firsts_ptr + begin, starts_ptr + begin, offsets_ptr, table_ptr,
                sampled_slots_ptr, base, tokens, found - begin, of_span, span, page_size,
            )  # fmt: skip
            tl.debug_barrier()
            for tile in tl.range(0, tokens, _TILE, num_stages=_STAGES):
                token = tile + tl.arange(0, _TILE)
                slots = tl.load(sampled_slots_ptr + token, mask=token < tokens, other=0)
                keys = keys_at(keys_ptr, slots, token < tokens, slot_stride, head_dim, dim_block)
                scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
                tl.store(
                    sampled_scores_ptr + rows_of_tile[:, None] * _LOOKED_UP + token[None, :],
                    scores,
                    mask=(rows_of_tile < group)[:, None] & (token < tokens)[None, :],
                )
            tl.debug_barrier()
            # Looked up only here: over the tiles there are no registers for it.
            is_listed = begin + some < found
            listed = tl.load(listed_ptr + begin + some, mask=is_listed, other=0)
            in_offsets = tl.load(list_firsts_ptr + begin + some, mask=is_listed, other=0)
            starts = tl.load(starts_ptr + begin + some, mask=is_listed, other=0)
            ends = tl.load(starts_ptr + begin + some + 1, mask=begin + some + 1 < found, other=0)
            ends = tl.where(is_listed, tl.where(begin + some + 1 < found, ends, total), 0)
            low, high = tl.maximum(starts, base), tl.minimum(ends, base + tokens)
            longest = tl.max(high - low, axis=0)
            is_cut = (listed & _NUMBER_MASK)[None, :] == last[:, None]
            stops = tl.where(is_cut, tl.minimum(stop[:, None] - in_offsets[None, :], high[None, :]), high[None, :])
            is_read = (listed[None, :] >> (heads[:, None] + _NUMBER_BITS)) & 1 != 0
            stops = tl.where(is_read, stops, 0)
            for rank in range(0, longest, of_round):
                at = low[:, None] + rank + added[None, :]
                is_added = at[None, :, :] < stops[:, :, None]
                places_of_scores = heads[:, None, None] * _LOOKED_UP + (at - base)[None, :, :]
                scores = tl.load(sampled_scores_ptr + places_of_scores, mask=is_added, other=NOTHING)
                above = tl.maximum(largest, tl.max(scores, axis=2))
                weights = tl.where(is_added, tl.exp2(scores - above[:, :, None]), 0.0)
                mass = mass * tl.exp2(largest - above) + tl.sum(weights, axis=2)
                largest = above
            # The next members go where these were.
            tl.debug_barrier()
        listed = tl.load(listed_ptr + begin + some, mask=begin + some < found, other=0)
        masses = tl.where(mass > 0, largest + tl.log2(tl.maximum(mass, 1e-38)), NOTHING)
        tl.store(
            masses_ptr + of_heads[:, None] * clusters + (listed & _NUMBER_MASK)[None, :],
            masses,
            mask=(listed[None, :] >> (heads[:, None] + _NUMBER_BITS)) & 1 != 0,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _look_up(
    listed_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    table_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    base: tl.tensor,
    tokens: tl.tensor,
    found: tl.tensor,
    of_span: tl.constexpr,
    span: tl.constexpr,
    page_size: tl.constexpr,
) -> None:
    """Store the slots of ``tokens`` members from ``base`` on, counted through the first ``_LISTED`` clusters."""
    place = tl.arange(0, _LOOKED_UP)
    is_member = place < tokens
    of_list = places_of(starts_ptr, base + place, found, _LISTED)
    listed = tl.load(listed_ptr + of_list, mask=is_member, other=0)
    in_offsets = base + place + tl.load(firsts_ptr + of_list, mask=is_member, other=0)
    offset = tl.load(offsets_ptr + in_offsets, mask=is_member, other=0).to(tl.int32)
    position = (listed & _NUMBER_MASK) // of_span * span + offset
    tl.store(slots_ptr + place, slots_at(table_ptr, position, is_member, page_size), mask=is_member)
