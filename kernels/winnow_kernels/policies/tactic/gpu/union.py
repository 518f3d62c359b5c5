"""What a KV head reads of clusters for its query heads, and what is sampled of the others (``selection``).

A row's clusters are dealt out by slices of consecutive ones, so that a single request keeps many multiprocessors busy.
What a slice lists stays in its place; who reads the lists adds up the totals of the slices before. All that a program
reads is under way together: it costs three loads that wait for each other, and then, for what is sampled, four more,
most often once.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.decode.predicted_attention import FLOOR, STEPS
from winnow_kernels.kernel_arguments import Heads
from winnow_kernels.policies.tactic.gpu.contexts import (
    GROUP_BLOCK,
    Row,
    addresses_of,
    count_read,
    group_queries,
    is_idle,
    keys_at,
    member_slots,
    offsets_of,
    row_at,
    scaled,
    span_table,
)
from winnow_kernels.policies.tactic.gpu.state import SLICE, Attention, Contexts, Cuts, Listed, Outside, Scored
from winnow_kernels.policies.tactic.parameters import WHOLE_ABOVE
from winnow_kernels.policies.tactic.reference import FIRST_OCTAVE, SHARE_STEPS, STEPS_OF_OCTAVE
from winnow_kernels.policies.tactic.sample import FACTORS, MIXERS, SAMPLED, UNIFORM_BITS
from winnow_kernels.selection.gpu_threshold import HIGHEST, count_of, counted, weight_of

WARPS: Final = 2
"""Of a program."""

_SLICE = tl.constexpr(SLICE)
_STEPS = tl.constexpr(STEPS)
_FLOOR = tl.constexpr(FLOOR)
_SHARE_STEPS = tl.constexpr(SHARE_STEPS)
_STEPS_OF_OCTAVE = tl.constexpr(STEPS_OF_OCTAVE)
_FIRST_OCTAVE = tl.constexpr(FIRST_OCTAVE)
_WHOLE_ABOVE = tl.constexpr(WHOLE_ABOVE)
_SAMPLED = tl.constexpr(SAMPLED)
_UNUSED_BITS = tl.constexpr(32 - UNIFORM_BITS)
_UNIT = tl.constexpr(2.0**-UNIFORM_BITS)
_OF_CLUSTER = tl.constexpr(FACTORS[0])
_OF_HEAD = tl.constexpr(FACTORS[1])
_OF_LENGTH = tl.constexpr(FACTORS[2])
_MIXER = tl.constexpr(MIXERS[0])
_SECOND_MIXER = tl.constexpr(MIXERS[1])
# Sampled tokens whose keys are under way together.
_SAMPLES = tl.constexpr(16)


@triton.jit  # type: ignore[untyped-decorator]
def union_kernel(
    attention: Attention,
    heads: Heads,
    contexts: Contexts,
    counts_ptr: tl.tensor,
    scored: Scored,
    cuts: Cuts,
    outside: Outside,
    listed: Listed,
    sample_bytes: tl.tensor,
    group_block: tl.constexpr,
    in_order: tl.constexpr,
) -> None:
    """List the clusters of a slice that some query head of a group takes, and sample the others."""
    part, kv_head = tl.program_id(0), tl.program_id(1)
    row = row_at(contexts, tl.program_id(2))
    if is_idle(row) | (part * _SLICE >= row.clusters):
        return
    of_kv_head = row.number.to(tl.int64) * heads.kv_heads + kv_head
    # Neighbouring ones in neighbouring threads, so that no block has to change places.
    number = part * _SLICE + tl.max_contiguous(tl.arange(0, _SLICE), 1)
    present = number < row.clusters
    members = tl.arange(0, group_block)
    is_head = members < heads.group
    of_heads = of_kv_head * heads.group + members
    # One after the other and before anything is used, so that all are under way together.
    address = addresses_of(contexts, row, number, present, kv_head)
    cut = tl.load(cuts.cuts + of_heads, mask=is_head, other=HIGHEST)
    total = tl.load(cuts.totals + of_heads, mask=is_head, other=0.0)
    is_any = is_head[:, None] & present[None, :]
    steps_ptr = scored.steps + of_heads[:, None] * scored.clusters + number[None, :]
    steps = tl.load(steps_ptr, mask=is_any, other=0).to(tl.int32)
    sizes = tl.load(contexts.tables.sizes + address, mask=present, other=0).to(tl.int32)
    firsts = tl.load(contexts.tables.firsts + address, mask=present, other=0)
    queries = group_queries(attention.queries, row, kv_head, heads, GROUP_BLOCK)

    is_taken = (steps >= cut[:, None]) & is_head[:, None]
    is_needed = (tl.max(is_taken.to(tl.int32), axis=0) > 0) & (sizes > 0)
    packed = tl.where(is_needed, counted(sizes), 0)
    tl.store(listed.totals + of_kv_head * (scored.clusters // _SLICE) + part, tl.sum(packed, axis=0))
    running = tl.cumsum(packed, axis=0)
    place = of_kv_head * scored.clusters + part * _SLICE + count_of(running) - 1
    tl.store(listed.numbers + place, number, mask=is_needed)
    tl.store(listed.firsts + place, firsts, mask=is_needed)
    tl.store(listed.starts + place, weight_of(running) - sizes, mask=is_needed)
    tl.store(listed.needed + place, sizes, mask=is_needed)

    shares = share_of(steps, total[:, None], is_any)
    mean = tl.sum(shares, axis=0) / heads.group
    if in_order:
        tl.store(listed.steps + place, share_step(mean), mask=is_needed)
    is_out = (sizes > 0) & ~is_needed
    left = tl.sum(tl.where(is_out[None, :], shares * sizes[None, :].to(tl.float32), 0.0), axis=1)
    shares_ptr = outside.shares + (of_heads * (scored.clusters // _SLICE) + part) * 3
    tl.store(shares_ptr, left, mask=is_head)

    # How many samples each of the others has, and how many have come with it.
    chance = (_mixed(number, kv_head, row.length) >> _UNUSED_BITS).to(tl.float32) * _UNIT
    samples = tl.where(is_out, tl.floor(_expected(mean, sizes, row) + chance).to(tl.int32), 0)
    ends = tl.cumsum(samples, axis=0)
    all_samples = tl.sum(samples, axis=0)
    _sample(attention, heads, contexts, row, kv_head, scored, cuts, outside, part, queries, ends, all_samples)
    count_read(counts_ptr, row, all_samples.to(tl.int64) * sample_bytes)


@triton.jit  # type: ignore[untyped-decorator]
def _sample(
    attention: Attention,
    heads: Heads,
    contexts: Contexts,
    row: Row,
    kv_head: tl.tensor,
    scored: Scored,
    cuts: Cuts,
    outside: Outside,
    part: tl.tensor,
    queries: tl.tensor,
    ends: tl.tensor,
    samples: tl.tensor,
) -> None:
    """Add up what a slice's sampled tokens weigh, and what they were predicted to weigh.

    Args:
        attention: the layer's keys.
        heads: of the layer.
        contexts: of the batch.
        row: the row.
        kv_head: the KV head.
        scored: clusters.
        cuts: masses.
        outside: gets the sums.
        part: number of the slice.
        queries: [GROUP_BLOCK, dim_block]; of the group.
        ends: int32 [SLICE]; samples of the slice's clusters up to and with each.
        samples: of all.
    """
    members = tl.arange(0, GROUP_BLOCK)
    is_head = members < heads.group
    of_heads = (row.number.to(tl.int64) * heads.kv_heads + kv_head) * heads.group + members
    offsets_ptr = offsets_of(contexts.tables, kv_head)
    table_ptr = span_table(contexts, row)
    weigh = tl.zeros([GROUP_BLOCK], tl.float32)
    predicted = tl.zeros([GROUP_BLOCK], tl.float32)
    total = tl.load(cuts.totals + of_heads, mask=is_head, other=0.0)
    for begin in tl.range(0, samples, _SAMPLES, num_stages=1):
        sample = begin + tl.arange(0, _SAMPLES)
        is_sample = sample < samples
        # Clusters whose samples all come before. Neighbouring samples are in neighbouring threads.
        is_before = ends[:, None] <= sample[None, :]
        number = part * _SLICE + tl.minimum(tl.sum(is_before.to(tl.int32), axis=0), _SLICE - 1)
        nth = sample - tl.max(tl.where(is_before, ends[:, None], 0), axis=0)
        is_both = is_head[:, None] & is_sample[None, :]
        steps_ptr = scored.steps + of_heads[:, None] * scored.clusters + number[None, :]
        steps = tl.load(steps_ptr, mask=is_both, other=0).to(tl.int32)
        address = addresses_of(contexts, row, number, is_sample, kv_head)
        size = tl.load(contexts.tables.sizes + address, mask=is_sample, other=1).to(tl.int32)
        first = tl.load(contexts.tables.firsts + address, mask=is_sample, other=0)
        chance = (_mixed(number, kv_head, row.length) * _OF_CLUSTER) >> 16
        rank = ((chance.to(tl.int32) * size >> 16) + nth) % tl.maximum(size, 1)
        slots = member_slots(contexts, table_ptr, offsets_ptr + first + rank, number, is_sample)
        keys = keys_at(attention, kv_head, slots, is_sample, heads)
        shares = share_of(steps, total[:, None], is_both)
        # Each stands for as many tokens as its cluster has for each sample.
        expected = _expected(tl.sum(shares, axis=0) / heads.group, size, row)
        worth = size.to(tl.float32) / tl.maximum(expected, 1e-30)
        scores = scaled(attention, tl.dot(queries, tl.trans(keys), input_precision="ieee"))
        weights = tl.exp2(scores - total[:, None].to(tl.float32)) * worth[None, :]
        weigh += tl.sum(tl.where(is_sample[None, :], weights, 0.0), axis=1)
        predicted += tl.sum(shares * worth[None, :], axis=1)
    shares_ptr = outside.shares + (of_heads * (scored.clusters // _SLICE) + part) * 3
    tl.store(shares_ptr + 1, weigh, mask=is_head)
    tl.store(shares_ptr + 2, predicted, mask=is_head)


@triton.jit  # type: ignore[untyped-decorator]
def _expected(mean: tl.tensor, sizes: tl.tensor, row: Row) -> tl.tensor:
    """Return how many tokens of clusters are sampled on average (``sample.expected_samples``): float32."""
    p = tl.minimum(row.share, _WHOLE_ABOVE)
    size = sizes.to(tl.float32)
    return tl.minimum(mean * size * (1.0 / (1.0 - p) * _SAMPLED).to(tl.float32), size)


@triton.jit  # type: ignore[untyped-decorator]
def share_of(steps: tl.tensor, total: tl.tensor, is_any: tl.tensor) -> tl.tensor:
    """Return which share of the mass a token holds by its step: float32; 0 below the floor, and where there is none."""
    # Octaves apart from what is left: so float32 loses nothing.
    octaves = tl.floor(total)
    below = steps.to(tl.int32) - octaves.to(tl.int32) * _STEPS
    logarithm = below.to(tl.float32) / _STEPS - (total - octaves).to(tl.float32)
    return tl.where(is_any & (logarithm >= _FLOOR), tl.exp2(logarithm), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def share_step(share: tl.tensor) -> tl.tensor:
    """Return in which step of the order a share of the mass is: int32."""
    step = (-tl.log2(tl.maximum(share, 1e-30)) - _FIRST_OCTAVE) * _STEPS_OF_OCTAVE
    return tl.minimum(tl.maximum(step, 0.0), _SHARE_STEPS - 1.0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _mixed(clusters: tl.tensor, kv_head: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Return a number that looks random for each cluster (``sample.chances``): uint32."""
    mixed = clusters.to(tl.uint32) * _OF_CLUSTER ^ kv_head.to(tl.uint32) * _OF_HEAD ^ length.to(tl.uint32) * _OF_LENGTH
    mixed = (mixed ^ (mixed >> 15)) * _MIXER
    mixed = (mixed ^ (mixed >> 12)) * _SECOND_MIXER
    return mixed ^ (mixed >> 15)
