"""Exact weights of members of clusters (``selection``)."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.indexes.kmeans import CLUSTER_SIZE
from winnow_kernels.policies.tactic.gpu.state import (
    GROUP_BLOCK,
    NOTHING,
    RANK_KNOWN,
    RANK_KNOWN_KEY,
    RANK_KNOWN_LAST,
    RANK_KNOWN_START,
    RANKS,
    group_queries,
    is_idle,
    keys_at,
    places_of,
    shape_of,
    slots_at,
    span_table,
    through,
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
    queries_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    cluster_sizes_ptr: tl.tensor,
    cluster_firsts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    clustered_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
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
    scale_log2: tl.tensor,
    query_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    capacity: tl.tensor,
    clusters: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    page_size: tl.constexpr,
    span: tl.constexpr,
    of_span: tl.constexpr,
    splits: tl.constexpr,
) -> None:
    """Weigh one split's clusters with exact weights, or one window of a query head.

    A cluster that several query heads of the group look at is read once. The first ``splits`` programs of a row and KV
    head have the clusters with exact weights, the others each a window.
    """
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share, cap = tl.load(shares_ptr + row), tl.load(caps_ptr + row)
    length, sinks, clustered, count = shape_of(lengths_ptr, clustered_ptr, sinks_ptr, row, span, of_span)
    if is_idle(share, length, clustered, cap) | (clustered == 0):
        return
    of_kv_head = row.to(tl.int64) * kv_heads + kv_head
    of_group = of_kv_head * group
    queries = group_queries(queries_ptr, row, kv_head, query_stride, group, head_dim, dim_block)
    keys_ptr += kv_head * head_stride
    table_ptr = span_table(table_ptr + row * table_stride, sinks, span, page_size)
    cluster_sizes_ptr += of_kv_head * clusters
    cluster_firsts_ptr += of_kv_head * clusters
    offsets_ptr += kv_head.to(tl.int64) * capacity * span
    heads, tokens = tl.arange(0, GROUP_BLOCK), tl.arange(0, _TOKENS)

    if part >= splits:
        window = part - splits
        of_head = of_group + window // 2
        windows_ptr += of_head * (2 * _WINDOW) + window % 2 * _WINDOW
        numbers = tl.load(windows_ptr + tokens // _SAMPLED)
        sizes = tl.load(cluster_sizes_ptr + numbers)
        first = tl.load(cluster_firsts_ptr + numbers)
        is_member = tokens % _SAMPLED < sizes
        offset = tl.load(offsets_ptr + first + tokens % _SAMPLED, mask=is_member, other=0).to(tl.int32)
        slots = slots_at(table_ptr, numbers // of_span * span + offset, is_member, page_size)
        keys = keys_at(keys_ptr, slots, is_member, slot_stride, head_dim, dim_block)
        of_all = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
        scores = tl.sum(tl.where((heads == window // 2)[:, None], of_all, 0.0), axis=0)
        scores = tl.reshape(tl.where(is_member, scores, NOTHING), (_WINDOW, _SAMPLED))
        largest = tl.max(scores, axis=1)
        weights = tl.where(tl.reshape(is_member, (_WINDOW, _SAMPLED)), tl.exp2(scores - largest[:, None]), 0.0)
        # The sample stands for all members.
        size = tl.max(tl.reshape(sizes, (_WINDOW, _SAMPLED)), axis=1).to(tl.float32)
        mass = tl.sum(weights, axis=1) * (size / tl.minimum(tl.maximum(size, 1.0), _SAMPLED))
        mass = tl.where(size > 0, largest + tl.log2(tl.maximum(mass, 1e-30)), NOTHING)
        window_masses_ptr += of_head * (2 * _WINDOW) + window % 2 * _WINDOW
        tl.store(window_masses_ptr + tl.arange(0, _WINDOW), mass)
        return

    places = tl.arange(0, _SLICE)
    numbers = (places // _TOGETHER * splits + part) * _TOGETHER + places % _TOGETHER
    present = numbers < count
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
    marks = tl.zeros((_SLICE,), tl.int32)
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
    of_slice = of_kv_head * clusters + part * _SLICE
    listed_ptr += of_slice
    list_firsts_ptr += of_slice
    starts_ptr += of_slice
    list_place = count_of(running) - 1
    start = weight_of(running) - sizes
    tl.store(listed_ptr + list_place, numbers | (marks << _NUMBER_BITS), mask=is_wanted)
    tl.store(list_firsts_ptr + list_place, firsts - start, mask=is_wanted)
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
        place, listed, in_offsets, slots = _members(
            listed_ptr + begin, list_firsts_ptr + begin, starts_ptr + begin, offsets_ptr, table_ptr, token + tokens,
            end, found - begin, of_span, span, page_size,
        )  # fmt: skip
        while token < end:
            keys = keys_at(keys_ptr, slots, token + tokens < end, slot_stride, head_dim, dim_block)
            token += _TOKENS
            # While these keys are on their way, the next are looked up.
            next_place, next_listed, next_in_offsets, next_slots = _members(
                listed_ptr + begin, list_firsts_ptr + begin, starts_ptr + begin, offsets_ptr, table_ptr, token + tokens,
                end, found - begin, of_span, span, page_size,
            )  # fmt: skip
            number = listed & _NUMBER_MASK
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
            counts = ((listed >> _NUMBER_BITS)[None, :] >> heads[:, None]) & 1 != 0
            counts = counts & ((number[None, :] != last[:, None]) | (in_offsets[None, :] < stop[:, None]))
            scores = tl.where(counts, scores, NOTHING)
            above = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.where(counts, tl.exp2(scores - above[:, None]), 0.0)
            # Sums by cluster.
            is_of = (place[:, None] == some[None, :]).to(tl.float32)
            mass = mass * tl.exp2(largest - above)[:, None] + tl.dot(weights, is_of, input_precision="ieee")
            largest = above
            place, listed, in_offsets, slots = next_place, next_listed, next_in_offsets, next_slots
        masses = tl.where(mass > 0, largest[:, None] + tl.log2(tl.maximum(mass, 1e-38)), NOTHING)
        weighed = tl.load(listed_ptr + begin + some, mask=begin + some < found, other=0)
        tl.store(
            masses_ptr + of_heads[:, None] * clusters + (weighed & _NUMBER_MASK)[None, :],
            masses,
            mask=((weighed >> _NUMBER_BITS)[None, :] >> heads[:, None]) & 1 != 0,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _members(
    listed_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    table_ptr: tl.tensor,
    tokens: tl.tensor,
    end: tl.tensor,
    found: tl.tensor,
    of_span: tl.constexpr,
    span: tl.constexpr,
    page_size: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Find the ``tokens``, int32 [n], before ``end``, counted through the first ``_LISTED`` clusters of a list.

    Returns:
        int32 [n] each: which cluster of the list, what is listed of it, places in the head's offsets, and slots.
    """
    is_member = tokens < end
    place = places_of(starts_ptr, tokens, found, _LISTED)
    listed = tl.load(listed_ptr + place, mask=is_member, other=0)
    in_offsets = tokens + tl.load(firsts_ptr + place, mask=is_member, other=0)
    offset = tl.load(offsets_ptr + in_offsets, mask=is_member, other=0).to(tl.int32)
    position = (listed & _NUMBER_MASK) // of_span * span + offset
    return place, listed, in_offsets, slots_at(table_ptr, position, is_member, page_size)
