"""Exact weights of members of clusters (``winnow_kernels.gpu.tactic``)."""

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
    addresses_of,
    group_queries,
    is_idle,
    keys_at,
    member_slots,
    through,
)
from winnow_kernels.gpu.threshold import ordered
from winnow_kernels.kmeans import CLUSTER_SIZE
from winnow_kernels.tactic import WINDOW_CLUSTERS

SPLITS: Final = 16
"""Programs among which the clusters of a row and KV head are dealt out, by eights in turn."""

_SAMPLED = tl.constexpr(CLUSTER_SIZE)
_WINDOWS = tl.constexpr(2 * WINDOW_CLUSTERS)
_TOGETHER = tl.constexpr(8)


@triton.jit  # type: ignore[untyped-decorator]
def sample_kernel(  # noqa: PLR0915 - its two halves share most of what they read
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
    ranks_ptr: tl.tensor,
    windows_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    window_masses_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    needed_ptr: tl.tensor,
    scale_log2: tl.tensor,
    query_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    entries_stride: tl.tensor,
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
    """Weigh one split's clusters with exact weights, or one query head's windows.

    A cluster that several query heads of the group look at is read once. The first ``splits`` programs of a row and KV
    head have the clusters with exact weights, the others each a query head.
    """
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share, cap = tl.load(shares_ptr + row), tl.load(caps_ptr + row)
    length, clustered = tl.load(lengths_ptr + row), tl.load(clustered_ptr + row)
    if is_idle(share, length, clustered, cap) | (clustered == 0):
        return
    count = clustered // span * of_span
    of_kv_head = row.to(tl.int64) * kv_heads + kv_head
    of_group = of_kv_head * group
    queries = group_queries(queries_ptr, row, kv_head, query_stride, group, head_dim, dim_block)
    keys_ptr += kv_head * head_stride
    table_ptr += row * table_stride
    entries_ptr += row * entries_stride
    heads = tl.arange(0, GROUP_BLOCK)
    sampled, together = tl.arange(0, _TOGETHER * _SAMPLED), tl.arange(0, _TOGETHER)

    if part >= splits:
        of_head = of_group + part - splits
        numbers = tl.load(windows_ptr + of_head * _WINDOWS + sampled // _SAMPLED)
        everywhere = numbers >= 0
        addresses = addresses_of(entries_ptr, numbers, everywhere, kv_head, capacity, of_span)
        sizes = tl.load(sizes_ptr + addresses).to(tl.int32)
        ranks = sampled % _SAMPLED
        is_member = ranks < sizes
        slots = member_slots(
            firsts_ptr, offsets_ptr, table_ptr, addresses, numbers, ranks, is_member, kv_head, capacity, of_span, span,
            page_size,
        )  # fmt: skip
        keys = keys_at(keys_ptr, slots, is_member, slot_stride, head_dim, dim_block)
        of_all = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
        scores = tl.sum(tl.where((heads == part - splits)[:, None], of_all, 0.0), axis=0)
        scores = tl.reshape(tl.where(is_member, scores, NOTHING), (_TOGETHER, _SAMPLED))
        largest = tl.max(scores, axis=1)
        weights = tl.where(tl.reshape(is_member, (_TOGETHER, _SAMPLED)), tl.exp2(scores - largest[:, None]), 0.0)
        # The sample stands for all members.
        size = tl.max(tl.reshape(sizes, (_TOGETHER, _SAMPLED)), axis=1).to(tl.float32)
        mass = tl.sum(weights, axis=1) * (size / tl.minimum(tl.maximum(size, 1.0), _SAMPLED))
        mass = tl.where(size > 0, largest + tl.log2(tl.maximum(mass, 1e-30)), NOTHING)
        tl.store(window_masses_ptr + of_head * _WINDOWS + together, mass)
        return

    block: tl.constexpr = clusters // splits
    places = tl.arange(0, block)
    numbers = (places // _TOGETHER * splits + part) * _TOGETHER + places % _TOGETHER
    present = numbers < count
    # One bit for each query head.
    wanted_by = tl.zeros((block,), tl.int32)
    for head in tl.static_range(group):
        head_ranks_ptr = ranks_ptr + (of_group + head) * RANKS
        scores_of_head = scores_ptr + (of_group + head) * clusters
        order_keys = ordered(tl.load(scores_of_head + numbers, mask=present, other=0.0))
        is_known = through(
            order_keys, numbers, tl.load(head_ranks_ptr + RANK_KNOWN_KEY), tl.load(head_ranks_ptr + RANK_KNOWN_LAST)
        )
        wanted_by |= tl.where(is_known & present, 1 << head, 0)
    is_wanted = wanted_by != 0
    running = tl.cumsum(is_wanted.to(tl.int32), axis=0)
    found = tl.max(running, axis=0)
    listed_ptr += of_kv_head * clusters + part * block
    needed_ptr += of_kv_head * clusters + part * block
    tl.store(listed_ptr + running - 1, numbers, mask=is_wanted)
    tl.store(needed_ptr + running - 1, wanted_by, mask=is_wanted)
    tl.debug_barrier()

    of_heads = of_group + heads
    is_head = heads < group
    last = tl.load(ranks_ptr + of_heads * RANKS + RANK_KNOWN_LAST, mask=is_head, other=-1)
    of_last = tl.load(ranks_ptr + of_heads * RANKS + RANK_KNOWN, mask=is_head, other=0) - tl.load(
        ranks_ptr + of_heads * RANKS + RANK_KNOWN_START, mask=is_head, other=0
    )
    for begin in range(0, found, _TOGETHER):
        place = begin + sampled // _SAMPLED
        listed = tl.load(listed_ptr + place, mask=place < found, other=0)
        marks = tl.load(needed_ptr + place, mask=place < found, other=0)
        addresses = addresses_of(entries_ptr, listed, place < found, kv_head, capacity, of_span)
        sizes = tl.load(sizes_ptr + addresses, mask=place < found, other=0).to(tl.int32)
        limits = tl.where(listed[None, :] == last[:, None], of_last[:, None], sizes[None, :])
        limits = tl.where((marks[None, :] >> heads[:, None]) & 1 != 0, limits, 0)
        largest = tl.full((GROUP_BLOCK, _TOGETHER), NOTHING, tl.float32)
        mass = tl.zeros((GROUP_BLOCK, _TOGETHER), tl.float32)
        for rank in range(0, tl.max(sizes, axis=0), _SAMPLED):
            ranks = rank + sampled % _SAMPLED
            is_member = ranks < sizes
            slots = member_slots(
                firsts_ptr, offsets_ptr, table_ptr, addresses, listed, ranks, is_member, kv_head, capacity, of_span,
                span, page_size,
            )  # fmt: skip
            keys = keys_at(keys_ptr, slots, is_member, slot_stride, head_dim, dim_block)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
            counts = ranks[None, :] < limits
            scores = tl.reshape(tl.where(counts, scores, NOTHING), (GROUP_BLOCK, _TOGETHER, _SAMPLED))
            above = tl.maximum(largest, tl.max(scores, axis=2))
            weights = tl.exp2(scores - above[:, :, None])
            weights = tl.where(tl.reshape(counts, (GROUP_BLOCK, _TOGETHER, _SAMPLED)), weights, 0.0)
            mass = mass * tl.exp2(largest - above) + tl.sum(weights, axis=2)
            largest = above
        masses = tl.where(mass > 0, largest + tl.log2(tl.maximum(mass, 1e-30)), NOTHING)
        cluster_place = begin + together
        cluster = tl.load(listed_ptr + cluster_place, mask=cluster_place < found, other=0)
        cluster_marks = tl.load(needed_ptr + cluster_place, mask=cluster_place < found, other=0)
        tl.store(
            masses_ptr + of_heads[:, None] * clusters + cluster[None, :],
            masses,
            mask=(cluster_marks[None, :] >> heads[:, None]) & 1 != 0,
        )
