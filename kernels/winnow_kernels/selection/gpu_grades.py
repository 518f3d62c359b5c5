"""The tokens with the highest grades, on a GPU: for policies whose scores are whole numbers, few of them.

- Scoring, which is the policy's own, writes 2 bytes a token, and counts the grades of one token in 16: the sample.
- Listing takes the tokens that are as good as the sample says they must be, or a little less, some twice as many as are
  wanted, and counts their grades. So nothing is counted that cannot matter.
- Taking finds from these counts the grade that is reached by as many as are wanted, and writes the slots of what is
  above it and of the first ones that have it, in the context's order. Where the sample was wrong, and too few are
  listed, each program counts all grades: that is slow, and never changes the selection.

Programs share out a context's tokens, and each counts what precedes its own, so that the order does not depend on which
is first. Batches with early termination take one launch more (``gpu_top.sort_selected``).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import DecodeBatch, DeviceSelection
from winnow_kernels.kernel_arguments import Counts, Number, Pointer, Rows, Selected
from winnow_kernels.selection.gpu_lists import ranks_of
from winnow_kernels.selection.gpu_slots import slots_at
from winnow_kernels.selection.gpu_top import TopRows, Unsorted, sort_selected, token_counts, write_always

GRADES: Final = 2048
"""Grades are whole numbers from 0 to 2,047."""
SAMPLED: Final = 16
"""One token in so many is in the sample."""
SAMPLE_GRADES: Final = 4
"""Neighbouring grades that are one in the sample."""
MAX_PARTS: Final = 16
"""Programs that share out a context's tokens."""

_TILE: Final = 4096
_GRADES = tl.constexpr(GRADES)
_SAMPLED = tl.constexpr(SAMPLED)
_SAMPLE_GRADES = tl.constexpr(SAMPLE_GRADES)
_BINS = tl.constexpr(GRADES // SAMPLE_GRADES)
_MAX_PARTS = tl.constexpr(MAX_PARTS)
_LINE = tl.constexpr(16)
_COUNTED = tl.constexpr(256)
_TAKEN = tl.constexpr(256)
# Standard deviations of the sample, for tokens that are independent of each other, and tokens.
_MARGIN = tl.constexpr(6.0)
_SPARE = tl.constexpr(8.0)


class GradeBuffers(NamedTuple):
    """Scratch, the same in all layers. Where a policy acts, scoring begins with counts of 0.

    Attributes:
        grades: int16 [rows, KV heads, tokens].
        samples: int32 [rows, KV heads, GRADES ÷ SAMPLE_GRADES]; of how many tokens of the sample have which grades.
        histograms: int32 [rows, KV heads, GRADES]; of listed tokens.
        listed: int32 [rows, KV heads, tokens]; positions, each part's from its first token on.
        counts: int32 [rows, KV heads, MAX_PARTS]; how many a part lists.
        unsorted: int32 [rows, KV heads, width]; selected positions that are still to be sorted.
        tokens: of a row and head, whole multiples of 4,096.
    """

    grades: Pointer
    samples: Pointer
    histograms: Pointer
    listed: Pointer
    counts: Pointer
    unsorted: Pointer
    tokens: Number

    @classmethod
    def empty(cls, rows: int, kv_heads: int, tokens: int, width: int, device: torch.device) -> GradeBuffers:
        """Return buffers for contexts of up to ``tokens`` tokens and selections of up to ``width``."""
        tokens = triton.cdiv(tokens, _TILE) * _TILE

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(rows, kv_heads, size, dtype=dtype, device=device)

        return cls(
            grades=zeros(tokens, torch.int16),
            samples=zeros(GRADES // SAMPLE_GRADES),
            histograms=zeros(GRADES),
            listed=zeros(tokens),
            counts=zeros(MAX_PARTS),
            unsorted=zeros(width),
            tokens=tokens,
        )

    @property
    def bytes(self) -> int:
        """Bytes of device memory."""
        return sum(tensor.nbytes for tensor in self if isinstance(tensor, Tensor))


def select_by_grade(
    batch: DecodeBatch,
    rows: TopRows,
    selection: DeviceSelection,
    buffers: GradeBuffers,
    key_bytes: float,
    *,
    any_by_score: bool,
) -> None:
    """Write the slots and counts of rows whose grades are in ``buffers``, and count the bytes that scoring has read.

    The newest page comes first, then the sinks, both in the context's order; then, also in the context's order or by
    descending grade, the tokens that are graded highest. Of equal grades the earlier token's comes first. A row whose
    selection is wider than there is room for attends to its whole context.

    Args:
        batch: the batch.
        rows: parameters of its rows.
        selection: what is written to.
        buffers: with the grades and the sample of the tokens before the newest page; those of sinks mean nothing, and
            the sample has none.
        key_bytes: read for each of these tokens and KV head, sinks included.
        any_by_score: whether ``rows.by_score`` may be set for any row.
    """
    kv_heads = selection.slots.shape[1]
    of_rows = (rows, Rows.of(batch), buffers)
    grid = (min(MAX_PARTS, buffers.tokens // _TILE), batch.rows, kv_heads)
    _list_kernel[grid](*of_rows, selection.slots.shape[2], tile=_TILE, num_warps=8)
    _take_kernel[grid](*of_rows, Selected.of(selection), Counts.of(batch), key_bytes, tile=_TILE, num_warps=8)
    if any_by_score:
        sort_selected(batch, rows, selection, Unsorted(buffers.grades, buffers.unsorted, buffers.tokens))


@triton.jit  # type: ignore[untyped-decorator]
def _list_kernel(parameters: TopRows, rows: Rows, buffers: GradeBuffers, width: tl.tensor, tile: tl.constexpr) -> None:
    """List the tokens that may be taken, in order, and count their grades. Grid: parts × rows × KV heads."""
    row = tl.program_id(1).to(tl.int64)
    earlier, sinks, wanted, count = token_counts(parameters, rows, row, True)
    size = _part_size(earlier, tile)
    begin = tl.program_id(0) * size
    if (wanted <= 0) | (count > width) | (begin >= earlier):
        return
    pair = row * tl.num_programs(2) + tl.program_id(2)
    least = _least_grade(buffers.samples + pair * _BINS, wanted)
    grades_ptr = buffers.grades + pair * buffers.tokens
    list_ptr = buffers.listed + pair * buffers.tokens + begin
    histogram_ptr = buffers.histograms + pair * _GRADES
    lines: tl.constexpr = tile // _LINE
    within = tl.arange(0, lines)[:, None] * _LINE + tl.arange(0, _LINE)[None, :]
    end = tl.minimum(begin + size, earlier)
    listed = 0
    for first in range(begin, end, tile):
        place = first + within
        # Behind the part's end there is memory still.
        grades = tl.load(grades_ptr + place).to(tl.int32)
        is_listed = (grades >= least) & (place >= sinks) & (place < end)
        ranks, more = ranks_of(is_listed)
        tl.store(list_ptr + listed + ranks, place, mask=is_listed)
        tl.atomic_add(histogram_ptr + grades, 1, mask=is_listed, sem="relaxed")
        listed += more
    tl.store(buffers.counts + pair * _MAX_PARTS + tl.program_id(0), listed)


@triton.jit  # type: ignore[untyped-decorator]
def _take_kernel(
    parameters: TopRows,
    rows: Rows,
    buffers: GradeBuffers,
    selected: Selected,
    counts: Counts,
    key_bytes: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Write the slots of what is listed and good enough. Grid: parts × rows × KV heads."""
    row = tl.program_id(1).to(tl.int64)
    earlier, sinks, wanted, count = token_counts(parameters, rows, row, True)
    if wanted < 0:
        return
    part, kv_heads = tl.program_id(0), tl.num_programs(2)
    if part == 0:
        write_always(parameters, rows, selected, counts, key_bytes, row, tl.program_id(2), kv_heads)
    size = _part_size(earlier, tile)
    if (wanted == 0) | (count > selected.width) | (part * size >= earlier):
        return
    pair = row * kv_heads + tl.program_id(2)
    graded = _Graded(buffers.grades + pair * buffers.tokens, buffers.listed + pair * buffers.tokens, sinks)
    grade = tl.arange(0, _GRADES)
    histogram = tl.load(buffers.histograms + pair * _GRADES + grade)
    are_listed = tl.sum(histogram, 0) >= wanted
    if not are_listed:
        histogram = _counted(graded, earlier, tile)
    reaching = tl.cumsum(histogram, 0, reverse=True)
    cut = tl.max(tl.where(reaching >= wanted, grade, 0), 0)
    # How many of those that have the grade ``cut`` are taken: the first ones.
    room = wanted - tl.sum(tl.where(grade > cut, histogram, 0), 0)

    parts = tl.arange(0, _MAX_PARTS)
    sizes = tl.load(buffers.counts + pair * _MAX_PARTS + parts, mask=parts <= part, other=0)
    # Unlisted, all tokens of a part are looked at.
    sizes = tl.where(are_listed, sizes, tl.where(parts <= part, tl.minimum(size, earlier - parts * size), 0))
    before = tl.where(parts < part, sizes, 0)
    above, equal = 0, 0
    for first in range(0, tl.max(before, 0), _COUNTED):
        number = first + tl.arange(0, _COUNTED)[None, :]
        _, grades = _entries(graded, (parts * size)[:, None], number, before[:, None], are_listed)
        above += tl.sum(tl.sum((grades > cut).to(tl.int32), 1), 0)
        equal += tl.sum(tl.sum((grades == cut).to(tl.int32), 1), 0)

    is_sorted = tl.load(parameters.by_score + row) != 0
    own_table_ptr = rows.page_table + row * rows.table_stride
    target = pair * selected.width + count - wanted
    own_size = tl.sum(tl.where(parts == part, sizes, 0), 0)
    for first in range(0, own_size, _TAKEN):
        number = first + tl.arange(0, _TAKEN)
        place, grades = _entries(graded, part * size, number, own_size, are_listed)
        is_above, is_equal = grades > cut, grades == cut
        is_taken = is_above | (is_equal & (equal + tl.cumsum(is_equal.to(tl.int32), 0) <= room))
        rank = above + tl.minimum(equal, room) + tl.cumsum(is_taken.to(tl.int32), 0) - 1
        if is_sorted:
            tl.store(buffers.unsorted + target + rank, place, mask=is_taken)
        else:
            slot = slots_at(own_table_ptr, place, is_taken, rows.page_size)
            tl.store(selected.slots + target + rank, slot, mask=is_taken)
        above += tl.sum(is_above.to(tl.int32), 0)
        equal += tl.sum(is_equal.to(tl.int32), 0)


class _Graded(NamedTuple):
    """A row and KV head's grades, and what is listed of its tokens; ``sinks`` are never taken."""

    grades: Pointer
    listed: Pointer
    sinks: Number


@triton.jit  # type: ignore[untyped-decorator]
def _part_size(earlier: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """Return how many tokens a program has, if it is not the last one that has any."""
    return tl.cdiv(earlier, tl.num_programs(0) * tile) * tile


@triton.jit  # type: ignore[untyped-decorator]
def _least_grade(sample_ptr: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """Return a grade that is almost certainly reached by ``wanted`` tokens, but not by many more."""
    bins = tl.arange(0, _BINS)
    reaching = tl.cumsum(tl.load(sample_ptr + bins), 0, reverse=True)
    expected = wanted.to(tl.float32) / _SAMPLED
    is_enough = reaching.to(tl.float32) >= expected + _MARGIN * tl.sqrt(expected) + _SPARE
    return tl.max(tl.where(is_enough, bins, 0), 0) * _SAMPLE_GRADES


@triton.jit  # type: ignore[untyped-decorator]
def _counted(graded: _Graded, earlier: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """Return how many tokens have which grade: int32 [GRADES]."""
    histogram = tl.zeros([_GRADES], tl.int32)
    for first in range(0, earlier, tile):
        place = first + tl.arange(0, tile)
        is_graded = (place >= graded.sinks) & (place < earlier)
        grades = tl.load(graded.grades + place, mask=is_graded, other=0).to(tl.int32)
        histogram += tl.histogram(grades, _GRADES, mask=is_graded)
    return histogram


@triton.jit  # type: ignore[untyped-decorator]
def _entries(
    graded: _Graded, begin: tl.tensor, number: tl.tensor, size: tl.tensor, are_listed: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the positions and grades of entries behind ``begin``: of a list, or else of the context itself.

    The grade is −1 of what is no entry, from ``size`` on, or no candidate.
    """
    is_entry = number < size
    place = begin + number
    place = tl.where(are_listed, tl.load(graded.listed + place, mask=is_entry & are_listed, other=0), place)
    is_entry &= place >= graded.sinks
    return place, tl.load(graded.grades + place, mask=is_entry, other=-1).to(tl.int32)
