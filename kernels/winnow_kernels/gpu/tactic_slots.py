"""Writing down what is attended to (``winnow_kernels.gpu.tactic``)."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.early_termination import TILE
from winnow_kernels.gpu.tactic_state import (
    GROUP_BLOCK,
    UNION_CLUSTERS,
    UNION_TAKEN,
    UNIONS,
    addresses_of,
    kept_tokens,
    member_slots,
    slots_at,
)
from winnow_kernels.kmeans import CLUSTER_SIZE

SPLITS: Final = 16
"""Programs among which the listed clusters, and the tokens in no cluster, of a row and KV head are dealt out."""

_TILE = tl.constexpr(TILE)
_MEMBERS = tl.constexpr(CLUSTER_SIZE)
_TOGETHER = tl.constexpr(32)
_TOKENS = tl.constexpr(256)


@triton.jit  # type: ignore[untyped-decorator]
def slot_kernel(
    firsts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    clustered_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    caps_ptr: tl.tensor,
    unions_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    needed_ptr: tl.tensor,
    places_ptr: tl.tensor,
    head_shares_ptr: tl.tensor,
    shares_sum_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    table_stride: tl.tensor,
    entries_stride: tl.tensor,
    capacity: tl.tensor,
    clusters: tl.tensor,
    width: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    page_size: tl.constexpr,
    span: tl.constexpr,
    of_span: tl.constexpr,
) -> None:
    """Write one split's slots: the newest tile, then members of clusters, then the other tokens in no cluster."""
    part, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(shares_ptr + row) == 0:
        return
    of_kv_head = row.to(tl.int64) * kv_heads + kv_head
    taken = tl.load(unions_ptr + of_kv_head * UNIONS + UNION_TAKEN)
    if part == 0:
        heads = tl.arange(0, GROUP_BLOCK)
        of_heads = of_kv_head * group + heads
        share = tl.load(head_shares_ptr + of_heads, mask=(heads < group) & (taken >= 0), other=1.0)
        so_far = tl.load(shares_sum_ptr + of_heads, mask=heads < group, other=0.0)
        tl.store(shares_sum_ptr + of_heads, so_far + share, mask=heads < group)
    if taken < 0:
        return
    table_ptr += row * table_stride
    slots_ptr += of_kv_head * width
    length, clustered = tl.load(lengths_ptr + row), tl.load(clustered_ptr + row)
    kept = kept_tokens(length, clustered, tl.load(caps_ptr + row))
    front = tl.minimum(kept, _TILE)
    for begin in range(part * _TOKENS, kept, tl.num_programs(0) * _TOKENS):
        newest = begin + tl.arange(0, _TOKENS)
        slots = slots_at(table_ptr, length - 1 - newest, newest < kept, page_size)
        tl.store(slots_ptr + tl.where(newest < front, newest, newest + taken), slots, mask=newest < kept)

    listed = tl.load(unions_ptr + of_kv_head * UNIONS + UNION_CLUSTERS)
    lanes = tl.arange(0, _TOGETHER * _MEMBERS)
    for begin in range(part * _TOGETHER, tl.where(taken > 0, listed, 0), tl.num_programs(0) * _TOGETHER):
        place = of_kv_head * clusters + begin + lanes // _MEMBERS
        is_listed = begin + lanes // _MEMBERS < listed
        numbers = tl.load(listed_ptr + place, mask=is_listed, other=0)
        first_place = tl.load(places_ptr + place, mask=is_listed, other=0)
        # The cap cuts what is behind it.
        needed = tl.minimum(tl.load(needed_ptr + place, mask=is_listed, other=0), taken - first_place)
        addresses = addresses_of(entries_ptr + row * entries_stride, numbers, is_listed, kv_head, capacity, of_span)
        for rank in range(0, tl.max(needed, axis=0), _MEMBERS):
            ranks = rank + lanes % _MEMBERS
            is_member = ranks < needed
            slots = member_slots(
                firsts_ptr, offsets_ptr, table_ptr, addresses, numbers, ranks, is_member, kv_head, capacity, of_span,
                span, page_size,
            )  # fmt: skip
            tl.store(slots_ptr + front + first_place + ranks, slots, mask=is_member)
