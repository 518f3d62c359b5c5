"""The tokens with the highest scores, on a GPU: for policies that score each key of a context.

- Scoring, which is the policy's own, writes 4 bytes a key and counts the scores in a histogram.
- Splitting finds the bin of the histogram in which the threshold lies. What lies in higher bins is selected, what lies
  in that one becomes a candidate. Programs share out a context's scores, and each counts what precedes its own, so that
  the order, the context's, does not depend on which is first.
- Settling selects among the candidates, of which there are some hundred at most unless scores are all but equal, by
  bisection, and writes the newest page and the sinks, which are not scored.

Batches with early termination take one launch more, which sorts what was selected by comparing each with each.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import WHOLE, Count, DecodeBatch, DeviceSelection
from winnow_kernels.kernel_arguments import Counts, Number, Pointer, Rows, Selected
from winnow_kernels.selection.gpu_partition import own_share, owner_of, programs_on
from winnow_kernels.selection.gpu_slots import slots_at
from winnow_kernels.selection.gpu_threshold import LOWEST, ordered

BINS: Final = 2048
"""Bins of the histogram, equally wide from −1 to 1, between which scores lie."""
MAX_CANDIDATES: Final = 4096
"""Candidates that are listed; if there are more, they are sought among all scores again."""

_BINS = tl.constexpr(BINS)
_MAX_CANDIDATES = tl.constexpr(MAX_CANDIDATES)
_WHOLE = tl.constexpr(WHOLE)
_READ_BYTES = tl.constexpr(int(Count.READ_BYTES))
# On each multiprocessor.
SORTING_PROGRAMS: Final = 2
_CHUNKS: Final = 16
_SORTED_AT_ONCE: Final = 64


class TopRows(NamedTuple):
    """The parameters of a batch's rows.

    Attributes:
        budgets: int32 [rows]; tokens for each KV head in this step, 0 for a row of another kind.
        sinks: int32 [rows]; first tokens, always attended to.
        by_score: int32 [rows]; not 0 where keys must come by descending score, as early termination needs them.
    """

    budgets: Tensor
    sinks: Tensor
    by_score: Tensor


class TopBuffers(NamedTuple):
    """Scratch, the same in all layers: 4 × rows × KV heads × (tokens + width + 6,144) bytes.

    Attributes:
        scores: float32 [rows, KV heads, tokens].
        histograms: int32 [rows, KV heads, BINS]; all 0 before and after a layer.
        candidates: int32 [rows, KV heads, MAX_CANDIDATES]; positions.
        unsorted: int32 [rows, KV heads, width]; selected positions that are still to be sorted.
        tokens: of a row and head.
    """

    scores: Tensor
    histograms: Tensor
    candidates: Tensor
    unsorted: Tensor
    tokens: int

    @classmethod
    def empty(cls, batch: DecodeBatch, selection: DeviceSelection) -> TopBuffers:
        """Return buffers for all rows of ``batch``."""
        rows, kv_heads, width = selection.slots.shape
        device = selection.slots.device
        return cls(
            torch.zeros(rows, kv_heads, batch.longest, dtype=torch.float32, device=device),
            torch.zeros(rows, kv_heads, BINS, dtype=torch.int32, device=device),
            torch.zeros(rows, kv_heads, MAX_CANDIDATES, dtype=torch.int32, device=device),
            torch.zeros(rows, kv_heads, width, dtype=torch.int32, device=device),
            batch.longest,
        )


def select_top(
    batch: DecodeBatch,
    rows: TopRows,
    selection: DeviceSelection,
    buffers: TopBuffers,
    key_bytes: int,
    *,
    any_by_score: bool,
) -> None:
    """Write the slots and counts of rows whose scores are in ``buffers``, and count the bytes that scoring has read.

    The newest page comes first, then the sinks, both in the context's order; then, also in the context's order or by
    descending score, the keys that score most. Of equal scores the earlier key's comes first. A row whose selection is
    wider than there is room for attends to its whole context.

    Args:
        batch: the batch.
        rows: parameters of its rows.
        selection: what is written to.
        buffers: with the scores and histograms of the keys before the newest page; sinks have none.
        key_bytes: read for each of these keys and KV head, sinks included.
        any_by_score: whether ``rows.by_score`` may be set for any row.
    """
    kv_heads = selection.slots.shape[1]
    block = min(1024, triton.next_power_of_2(buffers.tokens))
    of_rows = (rows, Rows.of(batch), buffers, Selected.of(selection))
    _split_kernel[(batch.rows, kv_heads, min(_CHUNKS, triton.cdiv(buffers.tokens, 1024)))](
        *of_rows, block=block, count_block=min(8192, triton.next_power_of_2(buffers.tokens)), num_warps=8
    )
    _settle_kernel[(batch.rows, kv_heads)](*of_rows, Counts.of(batch), key_bytes, block=block, num_warps=4)
    if any_by_score:
        sort_selected(batch, rows, selection, Unsorted(buffers.scores, buffers.unsorted, buffers.tokens))


class Unsorted(NamedTuple):
    """What is selected, and still to be put in order.

    Attributes:
        scores: float32 or int16 [rows, KV heads, tokens].
        positions: int32 [rows, KV heads, width]; where a selection's slots will be, from the first one selected by its
            score on.
        tokens: of a row and head.
    """

    scores: Tensor
    positions: Tensor
    tokens: int


def sort_selected(batch: DecodeBatch, rows: TopRows, selection: DeviceSelection, unsorted: Unsorted) -> None:
    """Write the slots of what is selected by its score by descending score, in rows where ``by_score`` is set.

    Of equal scores the one that is first among the positions comes first.
    """
    kv_heads = selection.slots.shape[1]
    pairs = batch.rows * kv_heads
    _sort_kernel[(programs_on(unsorted.scores.device, SORTING_PROGRAMS),)](
        rows,
        Rows.of(batch),
        unsorted,
        Selected.of(selection),
        pairs,
        block=_SORTED_AT_ONCE,
        kv_heads=kv_heads,
        pair_block=triton.next_power_of_2(pairs),
        num_warps=4,
    )


class Candidates(NamedTuple):
    """Scores of a row and head: those of so many ``places``, or listed ones, in part in the ``critical`` bin."""

    scores: Pointer
    listed: Pointer
    sinks: Number
    places: Number
    is_listed: Number
    critical: Number


@triton.jit  # type: ignore[untyped-decorator]
def _split_kernel(
    parameters: TopRows,
    rows: Rows,
    buffers: TopBuffers,
    selected: Selected,
    block: tl.constexpr,
    count_block: tl.constexpr,
) -> None:
    """Select what lies above the threshold's bin and list what lies in it, both in the context's order."""
    row = tl.program_id(0).to(tl.int64)
    earlier, sinks, wanted, count = token_counts(parameters, rows, row, True)
    chunk = tl.cdiv(earlier, tl.num_programs(2) * block) * block
    begin = tl.program_id(2) * chunk
    if (wanted <= 0) | (count > selected.width) | (begin >= earlier):
        return
    row_and_head = row * tl.num_programs(1) + tl.program_id(1)
    own_scores_ptr = buffers.scores + row_and_head * buffers.tokens
    critical, _, _ = _critical_bin(buffers.histograms + row_and_head * _BINS, earlier - sinks, wanted)
    # What precedes the chunk: selected in the lower half of the word, candidates in the upper half.
    preceding = tl.zeros([count_block], tl.int32)
    for start in range(0, begin, count_block):
        place = start + tl.arange(0, count_block)
        precedes = (place >= sinks) & (place < begin)
        bins = bin_of(tl.load(own_scores_ptr + place, mask=precedes, other=0.0))
        share = (bins > critical).to(tl.int32) + ((bins == critical).to(tl.int32) << 16)
        preceding += tl.where(precedes, share, 0)
    taken = tl.sum(preceding & 0xFFFF, axis=0)
    listed = tl.sum(preceding >> 16, axis=0)
    is_sorted = tl.load(parameters.by_score + row) != 0
    own_offset = row_and_head * selected.width + count - wanted
    end = tl.minimum(begin + chunk, earlier)
    for start in range(begin, end, block):
        place = start + tl.arange(0, block)
        inside = (place >= sinks) & (place < end)
        bins = bin_of(tl.load(own_scores_ptr + place, mask=inside, other=0.0))
        is_above = inside & (bins > critical)
        is_candidate = inside & (bins == critical)
        rank = tl.cumsum(is_above.to(tl.int32), axis=0)
        _write(own_offset + taken + rank - 1, place, is_above, is_sorted, buffers, selected, rows, row)
        number = listed + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
        tl.store(
            buffers.candidates + row_and_head * _MAX_CANDIDATES + number,
            place,
            mask=is_candidate & (number < _MAX_CANDIDATES),
        )
        taken += tl.sum(is_above.to(tl.int32), axis=0)
        listed += tl.sum(is_candidate.to(tl.int32), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _settle_kernel(
    parameters: TopRows,
    rows: Rows,
    buffers: TopBuffers,
    selected: Selected,
    counts: Counts,
    key_bytes: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Select among the candidates, write the newest page, the sinks and the count, and clear the histogram."""
    row = tl.program_id(0).to(tl.int64)
    earlier, sinks, wanted, count = token_counts(parameters, rows, row, True)
    if wanted < 0:
        return
    write_always(parameters, rows, selected, counts, key_bytes, row, tl.program_id(1), tl.num_programs(1))
    if count > selected.width:
        return
    row_and_head = row * tl.num_programs(1) + tl.program_id(1)
    own_histogram_ptr = buffers.histograms + row_and_head * _BINS
    critical, above, inside_bin = _critical_bin(own_histogram_ptr, earlier - sinks, wanted)
    # Other threads may still read what this one clears.
    tl.debug_barrier()
    tl.store(own_histogram_ptr + tl.arange(0, _BINS), tl.zeros([_BINS], tl.int32))
    if wanted == 0:
        return
    is_listed = inside_bin <= _MAX_CANDIDATES
    places = tl.where(is_listed, inside_bin, earlier)
    own_scores_ptr = buffers.scores + row_and_head * buffers.tokens
    own_candidates_ptr = buffers.candidates + row_and_head * _MAX_CANDIDATES
    among = Candidates(own_scores_ptr, own_candidates_ptr, sinks, places, is_listed, critical)
    room = wanted - above
    threshold, greater = _candidate_threshold(among, room, block)
    equal_room = room - greater
    is_sorted = tl.load(parameters.by_score + row) != 0
    offset = row_and_head * selected.width + count - room
    for start in range(0, places, block):
        place, keys, is_candidate = _candidates(among, start, block)
        is_equal = is_candidate & (keys == threshold)
        is_first = is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= equal_room)
        is_selected = (is_candidate & (keys > threshold)) | is_first
        rank = tl.cumsum(is_selected.to(tl.int32), axis=0)
        _write(offset + rank - 1, place, is_selected, is_sorted, buffers, selected, rows, row)
        offset += tl.sum(is_selected.to(tl.int32), axis=0)
        equal_room -= tl.sum(is_first.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def _sort_kernel(
    parameters: TopRows,
    rows: Rows,
    unsorted: Unsorted,
    selected: Selected,
    pairs: tl.tensor,
    kv_heads: tl.constexpr,
    block: tl.constexpr,
    pair_block: tl.constexpr,
) -> None:
    """Write the slots of what was selected by descending score: a key's place is how many precede it."""
    all_pairs = tl.arange(0, pair_block)
    in_batch = all_pairs < pairs
    all_rows = all_pairs // kv_heads
    _, _, all_wanted, all_counts = token_counts(parameters, rows, all_rows, in_batch)
    is_sorted = tl.load(parameters.by_score + all_rows, mask=in_batch, other=0) != 0
    blocks = tl.where(is_sorted & (all_wanted > 0) & (all_counts <= selected.width), tl.cdiv(all_wanted, block), 0)
    part, end = own_share(blocks)
    for each in range(part, end):
        pair, first, _after = owner_of(each, blocks)
        row = (pair // kv_heads).to(tl.int64)
        _earlier, _sinks, wanted, count = token_counts(parameters, rows, row, True)
        own_scores_ptr = unsorted.scores + pair.to(tl.int64) * unsorted.tokens
        own_offset = pair.to(tl.int64) * selected.width + count - wanted
        number = (each - first) * block + tl.arange(0, block)
        place, key = _unsorted(own_scores_ptr, unsorted.positions + own_offset, number, wanted)
        preceding = tl.zeros([block], tl.int32)
        for start in range(0, wanted, block):
            other_number = start + tl.arange(0, block)
            other_place, other_key = _unsorted(own_scores_ptr, unsorted.positions + own_offset, other_number, wanted)
            precedes = (other_key[None, :] > key[:, None]) | (
                (other_key[None, :] == key[:, None]) & (other_place[None, :] < place[:, None])
            )
            preceding += tl.sum((precedes & (other_number < wanted)[None, :]).to(tl.int32), axis=1)
        slot = slots_at(rows.page_table + row * rows.table_stride, place, number < wanted, rows.page_size)
        tl.store(selected.slots + own_offset + preceding, slot, mask=number < wanted)


@triton.jit  # type: ignore[untyped-decorator]
def token_counts(
    parameters: TopRows, rows: Rows, row: tl.tensor, in_batch: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return how many tokens lie before the newest page, and how many of these are sinks, selected, and read in all.

    What is read in all is the newest page, the sinks, and what is selected by score, which is −1 for rows of other
    kinds.
    """
    length = tl.load(rows.lengths + row, mask=in_batch, other=1)
    budget = tl.load(parameters.budgets + row, mask=in_batch, other=0)
    earlier = (length - 1) // rows.page_size * rows.page_size
    sinks = tl.minimum(tl.load(parameters.sinks + row, mask=in_batch, other=0), earlier)
    always = length - earlier + sinks
    wanted = tl.maximum(tl.minimum(length, budget) - always, 0)
    return earlier, sinks, tl.where(budget > 0, wanted, -1), always + wanted


@triton.jit  # type: ignore[untyped-decorator]
def write_always(
    parameters: TopRows,
    rows: Rows,
    selected: Selected,
    counts: Counts,
    key_bytes: tl.tensor,
    row: tl.tensor,
    kv_head: tl.tensor,
    kv_heads: tl.tensor,
) -> None:
    """Write the slots of the newest page and the sinks and the selection's count; count the bytes of what is scored.

    A selection for which there is no room is the whole context, and nothing is scored.
    """
    earlier, sinks, wanted, count = token_counts(parameters, rows, row, True)
    row_and_head = row * kv_heads + kv_head
    is_written = count <= selected.width
    tl.store(selected.counts + row_and_head, tl.where(is_written, count, _WHOLE))
    read_bytes = (earlier * key_bytes).to(tl.int64)
    counted_ptr = counts.pointer + row * counts.row_stride + _READ_BYTES
    tl.atomic_add(counted_ptr, read_bytes, mask=is_written, sem="relaxed")
    own_table_ptr = rows.page_table + row * rows.table_stride
    within = tl.arange(0, rows.page_size)
    newest_page = tl.load(own_table_ptr + earlier // rows.page_size)
    in_newest = count - wanted - sinks
    own_slots_ptr = selected.slots + row_and_head * selected.width
    newest_slot = newest_page * rows.page_size + within
    tl.store(own_slots_ptr + within, newest_slot, mask=is_written & (within < in_newest))
    for start in range(0, sinks, rows.page_size):
        first_slot = tl.load(own_table_ptr + start // rows.page_size) * rows.page_size
        is_sink = is_written & (start + within < sinks)
        tl.store(own_slots_ptr + in_newest + start + within, first_slot + within, mask=is_sink)


@triton.jit  # type: ignore[untyped-decorator]
def bin_of(scores: tl.tensor) -> tl.tensor:
    """Return the bins of scores; never a lower one for a higher score.

    Multiplying by a power of two is exact, so that it does not matter whether the compiler fuses it with the addition.
    """
    half: tl.constexpr = _BINS // 2
    return tl.minimum(tl.maximum((scores * half + half).to(tl.int32), 0), _BINS - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _critical_bin(
    histogram_ptr: tl.tensor, scored: tl.tensor, wanted: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the bin of the ``wanted`` largest score, and how many scores lie above and in it."""
    bins = tl.arange(0, _BINS)
    histogram = tl.load(histogram_ptr + bins)
    reaching = scored - tl.cumsum(histogram, axis=0) + histogram
    critical = tl.sum((reaching >= wanted).to(tl.int32), axis=0) - 1
    above = tl.sum(tl.where(bins > critical, histogram, 0), axis=0)
    return critical, above, tl.sum(tl.where(bins == critical, histogram, 0), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _candidates(among: Candidates, start: tl.tensor, block: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return positions, keys and whether they are candidates, of a block of the list, or of all if it overflowed.

    The key of what is no candidate is ``LOWEST``.
    """
    number = start + tl.arange(0, block)
    inside = number < among.places
    place = tl.where(among.is_listed, tl.load(among.listed + number, mask=inside & among.is_listed, other=0), number)
    scores = tl.load(among.scores + place, mask=inside, other=0.0)
    is_candidate = inside & (place >= among.sinks) & (bin_of(scores) == among.critical)
    return place, tl.where(is_candidate, ordered(scores), LOWEST), is_candidate


@triton.jit  # type: ignore[untyped-decorator]
def _candidate_threshold(among: Candidates, room: tl.tensor, block: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the largest key that at least ``room`` candidates reach, and how many are greater."""
    least = tl.full([block], 0x7FFFFFFF, tl.int32)
    most = tl.full([block], LOWEST, tl.int32)
    for start in range(0, among.places, block):
        _place, keys, is_candidate = _candidates(among, start, block)
        least = tl.minimum(least, tl.where(is_candidate, keys, 0x7FFFFFFF))
        most = tl.maximum(most, keys)
    # Bisecting only between the candidates' own keys, which share a bin, takes few rounds.
    low = tl.min(least, axis=0).to(tl.int64)
    high = tl.max(most, axis=0).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = tl.zeros([block], tl.int32)
        for start in range(0, among.places, block):
            _place, keys, is_candidate = _candidates(among, start, block)
            reached += (keys >= middle.to(tl.int32)).to(tl.int32)
        is_enough = tl.sum(reached, axis=0) >= room
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    greater = tl.zeros([block], tl.int32)
    for start in range(0, among.places, block):
        _place, keys, is_candidate = _candidates(among, start, block)
        greater += (keys > low.to(tl.int32)).to(tl.int32)
    return low.to(tl.int32), tl.sum(greater, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _write(
    target: tl.tensor,
    place: tl.tensor,
    is_selected: tl.tensor,
    is_sorted: tl.tensor,
    buffers: TopBuffers,
    selected: Selected,
    rows: Rows,
    row: tl.tensor,
) -> None:
    """Write the slots of selected positions, or the positions themselves where they are still to be sorted."""
    own_table_ptr = rows.page_table + row * rows.table_stride
    if is_sorted:
        tl.store(buffers.unsorted + target, place, mask=is_selected)
    else:
        slot = slots_at(own_table_ptr, place, is_selected, rows.page_size)
        tl.store(selected.slots + target, slot, mask=is_selected)


@triton.jit  # type: ignore[untyped-decorator]
def _unsorted(
    scores_ptr: tl.tensor, unsorted_ptr: tl.tensor, number: tl.tensor, count: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return positions and keys of what was selected."""
    place = tl.load(unsorted_ptr + number, mask=number < count, other=0)
    return place, ordered(tl.load(scores_ptr + place, mask=number < count, other=0.0).to(tl.float32))
