"""What a KV head reads of clusters for its query heads, and what is sampled of the others (``selection``).

A row's clusters are dealt out by slices of consecutive ones, so that a single request keeps many multiprocessors busy.
What a slice lists stays in its place; who reads the lists adds up the totals of the slices before. A program has some
slices, and all that it reads is under way together: it costs two loads that wait for each other, and then, for what
is sampled, three more for every ``_SAMPLES`` tokens.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.decode.predicted_attention import FLOOR, STEPS
from winnow_kernels.kernel_arguments import Heads
from winnow_kernels.policies.tactic.gpu.contexts import (
    GROUP_BLOCK,
    count_read,
    group_queries,
    is_idle,
    keys_at,
    member_slots,
    offsets_of,
    places_of,
    row_at,
    span_table,
)
from winnow_kernels.policies.tactic.gpu.state import SLICE, Attention, Contexts, Cuts, Listed, Outside, Scored
from winnow_kernels.policies.tactic.parameters import WHOLE_ABOVE
from winnow_kernels.policies.tactic.reference import FIRST_OCTAVE, SHARE_STEPS, STEPS_OF_OCTAVE
from winnow_kernels.policies.tactic.sample import FACTORS, MIXERS, SAMPLED, UNIFORM_BITS
from winnow_kernels.selection.gpu_threshold import HIGHEST, count_of, counted, weight_of

SLICES_OF_GROUP: Final = 16
"""Slices that a program looks through, for all query heads of a group together; of a larger group one."""

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
_SAMPLES = tl.constexpr(32)


@triton.jit  # type: ignore[untyped-decorator]
def union_kernel(  # noqa: PLR0915 - what is found on the way stays in registers
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
    of_program: tl.constexpr,
    in_order: tl.constexpr,
) -> None:
    """List the clusters of some slices that some query head of a group takes, and sample the others."""
    part, kv_head = tl.program_id(0), tl.program_id(1)
    row = row_at(contexts, tl.program_id(2))
    if is_idle(row) | (part * of_program * _SLICE >= row.clusters):
        return
    of_kv_head = row.number.to(tl.int64) * heads.kv_heads + kv_head
    slices = part * of_program + tl.arange(0, of_program)
    # Neighbouring ones in neighbouring threads, so that no block has to change places.
    numbers = slices[:, None] * _SLICE + tl.max_contiguous(tl.arange(0, _SLICE), 1)[None, :]
    present = numbers < row.clusters
    members = tl.arange(0, group_block)
    is_head = members < heads.group
    of_heads = of_kv_head * heads.group + members
    # One after the other and before anything is used, so that all are under way together.
    cut = tl.load(cuts.cuts + of_heads, mask=is_head, other=HIGHEST)
    total = tl.load(cuts.totals + of_heads, mask=is_head, other=0.0)
    steps = tl.load(
        scored.steps + of_heads[:, None, None] * scored.clusters + numbers[None, :, :],
        mask=is_head[:, None, None] & present[None, :, :],
        other=0,
    )
    sizes = tl.load(scored.sizes + of_kv_head * scored.clusters + numbers, mask=present, other=0)
    firsts = tl.load(scored.firsts + of_kv_head * scored.clusters + numbers, mask=present, other=0)

    is_taken = (steps >= cut[:, None, None]) & is_head[:, None, None]
    is_needed = (tl.max(is_taken.to(tl.int32), axis=0) > 0) & (sizes > 0)
    packed = tl.where(is_needed, counted(sizes), 0)
    tl.store(listed.totals + of_kv_head * (scored.clusters // _SLICE) + slices, tl.sum(packed, axis=1))
    running = tl.cumsum(packed, axis=1)
    place = of_kv_head * scored.clusters + slices[:, None] * _SLICE + count_of(running) - 1
    tl.store(listed.numbers + place, numbers, mask=is_needed)
    tl.store(listed.firsts + place, firsts, mask=is_needed)
    tl.store(listed.starts + place, weight_of(running) - sizes, mask=is_needed)
    tl.store(listed.needed + place, sizes, mask=is_needed)

    shares = share_of(steps, total[:, None, None], is_head[:, None, None] & present[None, :, :])
    mean = tl.sum(shares, axis=0) / heads.group
    if in_order:
        tl.store(listed.steps + place, share_step(mean), mask=is_needed)
    is_out = (sizes > 0) & ~is_needed
    left = tl.where(is_out[None, :, :], shares * sizes[None, :, :].to(tl.float32), 0.0)
    programs: tl.constexpr = scored.clusters // _SLICE
    shares_ptr = outside.shares + (of_heads * programs + part) * 3
    tl.store(shares_ptr, tl.sum(tl.sum(left, axis=2), axis=1), mask=is_head)

    # How many samples each of the others has, and how many come before them.
    size = sizes.to(tl.float32)
    p = tl.minimum(row.share, _WHOLE_ABOVE)
    expected = tl.minimum(mean * size * (1.0 / (1.0 - p) * _SAMPLED).to(tl.float32), size)
    chance = _mixed(numbers, kv_head, row.length)
    uniform = (chance >> _UNUSED_BITS).to(tl.float32) * _UNIT
    samples = tl.where(is_out, tl.floor(expected + uniform).to(tl.int32), 0)
    of_slices = tl.sum(samples, axis=1)
    starts = (tl.cumsum(of_slices, axis=0) - of_slices)[:, None] + tl.cumsum(samples, axis=1) - samples
    all_samples = tl.sum(of_slices, axis=0)
    of_program_ptr = of_kv_head * scored.clusters + part * of_program * _SLICE
    tl.store(outside.starts + of_kv_head * scored.clusters + numbers, starts)
    worths = size / tl.maximum(expected, 1e-30)
    tl.store(outside.worths + of_kv_head * scored.clusters + numbers, worths)
    tl.debug_barrier()
    _sample(
        attention,
        heads,
        contexts,
        row,
        kv_head,
        scored,
        cuts,
        outside,
        of_kv_head,
        of_program_ptr,
        part,
        all_samples,
        of_program * _SLICE,
    )
    count_read(counts_ptr, row, all_samples.to(tl.int64) * sample_bytes)


@triton.jit  # type: ignore[untyped-decorator]
def _sample(
    attention: Attention,
    heads: Heads,
    contexts: Contexts,
    row: tl.tuple,
    kv_head: tl.tensor,
    scored: Scored,
    cuts: Cuts,
    outside: Outside,
    of_kv_head: tl.tensor,
    first_place: tl.tensor,
    part: tl.tensor,
    samples: tl.tensor,
    clusters: tl.constexpr,
) -> None:
    """Add up what a program's sampled tokens weigh, and what they were predicted to weigh.

    Args:
        attention: queries and keys.
        heads: of the layer.
        contexts: of the batch.
        row: the row.
        kv_head: the KV head.
        scored: clusters.
        cuts: masses.
        outside: with the places of samples; gets the sums.
        of_kv_head: number of the KV head, through all rows.
        first_place: where the program's clusters begin in what there is by clusters.
        part: number of the program.
        samples: how many there are.
        clusters: of the program.
    """
    members = tl.arange(0, GROUP_BLOCK)
    is_head = members < heads.group
    of_heads = of_kv_head * heads.group + members
    total = tl.load(cuts.totals + of_heads, mask=is_head, other=0.0)
    queries = group_queries(attention.queries, row, kv_head, heads)
    offsets_ptr = offsets_of(contexts.tables, kv_head)
    table_ptr = span_table(contexts, row)
    weigh = tl.zeros([GROUP_BLOCK], tl.float32)
    predicted = tl.zeros([GROUP_BLOCK], tl.float32)
    for begin in range(0, samples, _SAMPLES):
        sample = begin + tl.arange(0, _SAMPLES)
        is_sample = sample < samples
        place = first_place + places_of(outside.starts + first_place, sample, clusters, clusters)
        number = (place - of_kv_head * scored.clusters).to(tl.int32)
        size = tl.load(scored.sizes + place, mask=is_sample, other=1)
        first = tl.load(scored.firsts + place, mask=is_sample, other=0)
        worth = tl.load(outside.worths + place, mask=is_sample, other=0.0)
        start = tl.load(outside.starts + place, mask=is_sample, other=0)
        chance = (_mixed(number, kv_head, row.length) * _OF_CLUSTER) >> 16
        rank = ((chance.to(tl.int32) * size >> 16) + sample - start) % tl.maximum(size, 1)
        slots = member_slots(contexts, table_ptr, offsets_ptr + first + rank, number, is_sample)
        keys = keys_at(attention.keys, kv_head, slots, is_sample, heads)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * attention.scale_log2
        weights = tl.exp2(scores - total[:, None].to(tl.float32)) * worth[None, :]
        weigh += tl.sum(tl.where(is_sample[None, :], weights, 0.0), axis=1)
        is_both = is_head[:, None] & is_sample[None, :]
        steps = tl.load(scored.steps + of_heads[:, None] * scored.clusters + number[None, :], mask=is_both, other=0)
        predicted += tl.sum(share_of(steps, total[:, None], is_both) * worth[None, :], axis=1)
    shares_ptr = outside.shares + (of_heads * (scored.clusters // _SLICE) + part) * 3
    tl.store(shares_ptr + 1, weigh, mask=is_head)
    tl.store(shares_ptr + 2, predicted, mask=is_head)


@triton.jit  # type: ignore[untyped-decorator]
def share_of(steps: tl.tensor, total: tl.tensor, is_any: tl.tensor) -> tl.tensor:
    """Return which share of the mass a token holds by its step: float32; 0 below the floor, and where there is none."""
    logarithm = (steps.to(tl.float64) / _STEPS - total).to(tl.float32)
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
