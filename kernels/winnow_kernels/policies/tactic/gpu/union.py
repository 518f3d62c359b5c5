"""What a KV head reads of clusters for its query heads (``selection``).

A row's clusters are dealt out by slices of consecutive ones, so that a single request keeps many multiprocessors busy.
What a slice lists stays in its place; who reads the lists adds up the totals of the slices before. A program has some
slices, and all that it reads is under way together: it costs two loads that wait for each other.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from winnow_kernels.kernel_arguments import Heads
from winnow_kernels.policies.tactic.gpu.contexts import is_idle, row_at, through
from winnow_kernels.policies.tactic.gpu.state import (
    CUT_KEY,
    CUT_LAST,
    CUT_TAKEN,
    CUTS,
    SLICE,
    Contexts,
    Fitted,
    Listed,
    Scored,
)
from winnow_kernels.selection.gpu_threshold import HIGHEST, count_of, counted, ordered, weight_of

SLICES_OF_GROUP: Final = 16
"""Slices that a program looks through, for all query heads of a group together; of a larger group one."""

_SLICE = tl.constexpr(SLICE)


@triton.jit  # type: ignore[untyped-decorator]
def union_kernel(
    contexts: Contexts,
    heads: Heads,
    scored: Scored,
    fitted: Fitted,
    listed: Listed,
    group_block: tl.constexpr,
    of_program: tl.constexpr,
) -> None:
    """List the clusters of some slices of which some query head of a group takes something, and how much of each."""
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
    key = tl.load(fitted.cuts + of_heads * CUTS + CUT_KEY, mask=is_head, other=HIGHEST)
    last = tl.load(fitted.cuts + of_heads * CUTS + CUT_LAST, mask=is_head, other=-1)
    taken = tl.load(fitted.cuts + of_heads * CUTS + CUT_TAKEN, mask=is_head, other=0)
    scores = tl.load(
        scored.scores + of_heads[:, None, None] * scored.clusters + numbers[None, :, :],
        mask=is_head[:, None, None] & present[None, :, :],
        other=0.0,
    )
    sizes = tl.load(scored.sizes + of_kv_head * scored.clusters + numbers, mask=present, other=0)
    firsts = tl.load(scored.firsts + of_kv_head * scored.clusters + numbers, mask=present, other=0)

    key, last, taken = key[:, None, None], last[:, None, None], taken[:, None, None]
    is_taken = through(ordered(scores), numbers[None, :, :], key, last - 1)
    needed = tl.where(is_taken, sizes[None, :, :], 0)
    needed = tl.where(numbers[None, :, :] == last, taken, needed)
    needed = tl.max(tl.where(is_head[:, None, None] & present[None, :, :], needed, 0), axis=0)
    is_needed = needed > 0
    packed = tl.where(is_needed, counted(needed), 0)
    tl.store(listed.totals + of_kv_head * (scored.clusters // _SLICE) + slices, tl.sum(packed, axis=1))
    running = tl.cumsum(packed, axis=1)
    place = of_kv_head * scored.clusters + slices[:, None] * _SLICE + count_of(running) - 1
    tl.store(listed.numbers + place, numbers, mask=is_needed)
    tl.store(listed.firsts + place, firsts, mask=is_needed)
    tl.store(listed.starts + place, weight_of(running) - needed, mask=is_needed)
    tl.store(listed.needed + place, needed, mask=is_needed)
