"""What is known of masses as soon as all tokens are scored."""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.decode.predicted_attention import STEPS
from winnow_kernels.indexes.key_codes import BLOCK
from winnow_kernels.kernel_arguments import Rows
from winnow_kernels.policies.lowbit_top_p.gpu.state import (
    MARKS,
    SAMPLED,
    SPAN,
    SPARE,
    UNIT_MARK,
    Anchors,
    Policies,
    Scratch,
    Shape,
    bounds_of,
    floor_of,
    weight_of_kept,
    weights_of,
)
from winnow_kernels.policies.lowbit_top_p.parameters import WHOLE_ABOVE

_MARKS = tl.constexpr(MARKS)
_SPAN = tl.constexpr(SPAN)
_SPANS = tl.constexpr(64)
_STEPS = tl.constexpr(float(STEPS))
_UNIT_MARK = tl.constexpr(UNIT_MARK)
_SAMPLED = tl.constexpr(SAMPLED)
# Neighbours are alike, so a sample is of many blocks.
_APART = tl.constexpr(256)
_BLOCK = tl.constexpr(BLOCK)
_WHOLE_ABOVE = tl.constexpr(WHOLE_ABOVE)
_SPARE = tl.constexpr(SPARE)


@triton.jit  # type: ignore[untyped-decorator]
def total_kernel(
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    anchors: Anchors,
    window: tl.constexpr,
    by_key: tl.constexpr,
    again: tl.constexpr,
) -> None:
    """Add up the masses of spans, and say by a sample from which marks on tokens are to be counted, unless ``by_key``.

    Query heads whose marks do not reach are left open, with other bases: they are marked, and this is done, ``again``.
    Grid: programs that share a pair's sample × rows × KV heads; the last one of a pair does all else.
    """
    if again:  # noqa: SIM102  # A condition of the launch and one of the batch.
        if tl.load(scratch.any_open) == 0:
            return
    row, kv_head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    pair = row * shape.kv_heads + kv_head
    head = tl.arange(0, shape.padded_group)
    of_heads = pair * shape.padded_group + head
    _, scored, _ = bounds_of(rows, policies, row, window)
    is_due = (head < shape.group) & (scored > 0)
    if again:
        is_due &= tl.load(scratch.open + of_heads) != 0
    if tl.max(is_due.to(tl.int32), 0) > 0:
        if by_key:
            _settle(row, kv_head, is_due, rows, policies, shape, scratch, anchors, window, by_key, again)
        else:
            sample = tl.arange(0, _SAMPLED // _APART * _BLOCK)
            token = sample // _BLOCK * _APART + sample % _BLOCK
            marks = tl.arange(0, _MARKS)
            for begin in range(tl.program_id(0) * _SAMPLED, scored, tl.num_programs(0) * _SAMPLED):
                marks_ptr = scratch.marks + (pair * scratch.tokens + begin + token) * shape.padded_group
                for each in range(shape.group):
                    is_own = begin + token < scored
                    if again:
                        is_own &= tl.load(scratch.open + pair * shape.padded_group + each) != 0
                    of_head = tl.load(marks_ptr + each, mask=is_own, other=0).to(tl.int32)
                    counts = tl.histogram(of_head, _MARKS, mask=of_head > 0)
                    sample_ptr = scratch.samples + (pair * shape.padded_group + each) * _MARKS + marks
                    tl.atomic_add(sample_ptr, counts, mask=counts > 0, sem="relaxed")
            # What all threads have added must be there before anyone sees that this program is done.
            tl.debug_barrier()
            done = tl.atomic_add(scratch.sampled + pair, 1, sem="acq_rel")
            if done == tl.num_programs(0) - 1:
                tl.store(scratch.sampled + pair, 0)
                tl.debug_barrier()
                _settle(row, kv_head, is_due, rows, policies, shape, scratch, anchors, window, by_key, again)


@triton.jit  # type: ignore[untyped-decorator]
def _settle(
    row: tl.tensor,
    kv_head: tl.tensor,
    is_due: tl.tensor,
    rows: Rows,
    policies: Policies,
    shape: Shape,
    scratch: Scratch,
    anchors: Anchors,
    window: tl.constexpr,
    by_key: tl.constexpr,
    again: tl.constexpr,
) -> None:
    length, scored, sinks = bounds_of(rows, policies, row, window)
    pair = row * shape.kv_heads + kv_head
    head = tl.arange(0, shape.padded_group)
    of_heads = pair * shape.padded_group + head
    kept, bases = tl.load(scratch.kept + of_heads), tl.load(scratch.bases + of_heads)
    tops = tl.load(scratch.tops + of_heads)
    column = tl.arange(0, shape.columns)
    others = tl.zeros([shape.columns], tl.float64)
    spans = tl.cdiv(scored, _SPAN)
    for begin in range(0, spans, _SPANS):
        each = begin + tl.arange(0, _SPANS)
        masses_ptr = scratch.masses + (pair * scratch.spans + each)[:, None] * shape.columns + column[None, :]
        masses = tl.load(masses_ptr, mask=(each < spans)[:, None], other=0.0)
        others += tl.sum(masses.to(tl.float64), 0)
    # Several tokens share a row of columns.
    others = tl.sum(tl.reshape(others, [shape.columns // shape.padded_group, shape.padded_group]), 0)
    total = (weight_of_kept(kept, bases) + others).to(tl.float32)
    steps = tl.log2(total) * _STEPS
    tl.store(scratch.totals + of_heads, total)
    # The lowest step that counts holds 2^-24 of the mass.
    tl.store(scratch.floors + of_heads, tl.ceil(steps).to(tl.int32) - 1)
    if not by_key:
        least = tl.minimum(tl.load(policies.least + row) - (length - scored + sinks), scored - sinks)
        sampled = _sampled(scored) - _sampled(sinks)
        of_all = (scored - sinks).to(tl.float32) / tl.maximum(sampled, 1).to(tl.float32)
        share = tl.load(policies.shares + row)
        start = _start(of_heads, (1.0 - share).to(tl.float32) * total, least, of_all, scratch)
        # The highest is counted in any case.
        start = tl.maximum(tl.minimum(start, tl.minimum(tops - bases, _MARKS - 2)), 1)
        if share > _WHOLE_ABOVE:
            start = start * 0
        tl.store(scratch.starts + of_heads, start, mask=is_due)
        # What has the mark 0 is listed at most.
        tl.store(scratch.counted_from + of_heads, tl.maximum(start, 1), mask=is_due)
    of_request = (tl.load(anchors.slots + row) * shape.kv_heads + kv_head) * shape.group + head
    tl.store(anchors.tops + of_request, tops, mask=is_due)
    if again:
        tl.store(scratch.open + of_heads, tl.zeros([shape.padded_group], tl.int32))
    else:
        unit = tl.maximum(tl.floor(kept).to(tl.int32), tops)
        is_open = is_due & ((unit - _UNIT_MARK <= bases) | (tops - bases >= _MARKS - 1))
        tl.store(scratch.open + of_heads, is_open.to(tl.int32))
        tl.store(scratch.bases + of_heads, floor_of(unit), mask=is_open)
        if not by_key:
            # Their sample is taken again.
            samples_ptr = scratch.samples + of_heads[:, None] * _MARKS + tl.arange(0, _MARKS)[None, :]
            nothing = tl.zeros([shape.padded_group, _MARKS], tl.int32)
            tl.store(samples_ptr, nothing, mask=is_open[:, None])
        if tl.max(is_open.to(tl.int32), 0) > 0:
            tl.store(scratch.any_open, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _sampled(tokens: tl.tensor) -> tl.tensor:
    """Return how many of the first ``tokens`` are in the sample."""
    return tokens // _APART * _BLOCK + tl.minimum(tokens % _APART, _BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _start(of_heads: tl.tensor, spare: tl.tensor, least: tl.tensor, of_all: tl.tensor, scratch: Scratch) -> tl.tensor:
    """Return the marks, by the sample of a pair, below which no token will be taken: int32 [padded group].

    Args:
        of_heads: numbers of the pair's heads.
        spare: float32 [padded group]; mass that may be left out.
        least: tokens to take at least.
        of_all: tokens for each of the sample.
        scratch: with the sample.
    """
    marks = tl.arange(0, _MARKS)
    samples_ptr = scratch.samples + of_heads[:, None] * _MARKS + marks[None, :]
    counts = tl.load(samples_ptr, cache_modifier=".cg")
    tokens = counts.to(tl.float32) * of_all
    # From below: there are many tokens that make the mass which is left out, and few that make what is taken.
    masses = tl.cumsum(tokens * weights_of(marks)[None, :], 1)
    start = tl.sum((masses <= spare[:, None]).to(tl.int32), 1) - _SPARE
    enough = tl.cumsum(tokens, 1, reverse=True) >= 1.25 * least.to(tl.float32)
    return tl.where(least > 0, tl.minimum(start, tl.sum(enough.to(tl.int32), 1) - _SPARE), start)
