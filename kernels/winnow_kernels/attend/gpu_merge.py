"""How a selection is split among programs of ``attend.gpu``, and how what they yield becomes one.

Without early termination a split is a run of neighbouring tiles: 2 of a short selection, which fills the device even
in a batch of one, 4 of a longer one, where merging must not cost much, and more where it takes that for a selection to
have at most 64 splits. A few tiles that remain, as of 1,024 recent tokens and 4 attention sinks, make no split of their
own, which would be dealt out like a whole one. With early termination, splits are those of
``attend.early_termination``. In both cases they follow from the selection's own length, so that what a row gets
does not depend on its neighbours.

Merging reads a float32 output and a log-sum-exp for each query head and split, in the order of the splits.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl

from winnow_kernels.attend.early_termination import MAX_SPLITS, TILE, TILES_PER_SPLIT
from winnow_kernels.attend.gpu_softmax import grown_by_sinks, sinks_log2
from winnow_kernels.batch import COUNTS, ELSEWHERE, WHOLE_TO_THE_END, Count, ReportedShares
from winnow_kernels.kernel_arguments import Heads, Pointer, Rows, Selected, Vectors

PARTIAL_SLOTS: Final = 64
"""Of a selection; a power of two, and no less than with early termination."""
SHORT_RUN: Final = 2
"""Tiles of a split of a short selection."""
LONG_RUN: Final = 4
"""Tiles of a split of a longer one, unless that makes too many of them."""
RUNS_TO_FILL: Final = 16
"""Splits of a selection that is no longer short."""

_PARTIAL_SLOTS = tl.constexpr(PARTIAL_SLOTS)
_SHORT_RUN = tl.constexpr(SHORT_RUN)
_LONG_RUN = tl.constexpr(LONG_RUN)
_RUNS_TO_FILL = tl.constexpr(RUNS_TO_FILL)
_TILE = tl.constexpr(TILE)
_TILES_PER_SPLIT = tl.constexpr(TILES_PER_SPLIT)
_MAX_SPLITS = tl.constexpr(MAX_SPLITS)
_TO_THE_END = tl.constexpr(WHOLE_TO_THE_END)
_ELSEWHERE = tl.constexpr(ELSEWHERE)
_COUNTS = tl.constexpr(COUNTS)
_CONTEXT = tl.constexpr(int(Count.CONTEXT))
_ATTENDED = tl.constexpr(int(Count.ATTENDED))
_CONTEXT_BYTES = tl.constexpr(int(Count.CONTEXT_BYTES))
_READ_BYTES = tl.constexpr(int(Count.READ_BYTES))
_TRAVERSALS = tl.constexpr(int(Count.TRAVERSALS))
_TERMINATED = tl.constexpr(int(Count.TERMINATED))
_TILES = tl.constexpr(int(Count.TILES))
_SKIPPED_TILES = tl.constexpr(int(Count.SKIPPED_TILES))

INFINITY = tl.constexpr(float("inf"))
LN_2 = tl.constexpr(0.6931471805599453)


class Partial(NamedTuple):
    """What splits yield, ``PARTIAL_SLOTS`` for each of so many rows and heads.

    Attributes:
        outputs: float32 [rows, query heads, splits, head dim].
        masses: float32 [rows, query heads, splits]; log-sum-exp to base 2.
        tiles_read: int32 [rows, KV heads, splits]; of rows with early termination.
    """

    outputs: Pointer
    masses: Pointer
    tiles_read: Pointer


@triton.jit  # type: ignore[untyped-decorator]
def splits_of(tokens: tl.tensor, stops: tl.tensor) -> tl.tensor:
    """Return the number of splits of selections of ``tokens``; ``stops`` where reading may stop early."""
    tiles = tl.cdiv(tokens, _TILE)
    dealt = tl.minimum(tl.cdiv(tiles, _TILES_PER_SPLIT), _MAX_SPLITS)
    run = run_of(tiles)
    runs = tl.cdiv(tl.maximum(tiles - spare_of(run), tl.minimum(tiles, 1)), run)
    return tl.where(stops, dealt, runs)


@triton.jit  # type: ignore[untyped-decorator]
def tiles_of_split(split: tl.tensor, tokens: tl.tensor, stops: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a split's first tile, how far apart its tiles are, and how many it has."""
    tiles = tl.cdiv(tokens, _TILE)
    run = run_of(tiles)
    splits = splits_of(tokens, stops)
    first = tl.where(stops, split, split * run)
    every = tl.where(stops, splits, 1)
    own = tl.where(split == splits - 1, tiles - first, run)
    return first, every, tl.where(stops, tl.cdiv(tiles - split, splits), own)


@triton.jit  # type: ignore[untyped-decorator]
def run_of(tiles: tl.tensor) -> tl.tensor:
    """Return how many neighbouring tiles make a split; the last one may have more, or fewer."""
    run = tl.minimum(tl.maximum(tl.cdiv(tiles, _RUNS_TO_FILL), _SHORT_RUN), _LONG_RUN)
    return tl.maximum(run, tl.cdiv(tiles, _PARTIAL_SLOTS))


@triton.jit  # type: ignore[untyped-decorator]
def spare_of(run: tl.tensor) -> tl.tensor:
    """Return how many tiles that remain are too few for a split: the one before has them too."""
    return run // 2


@triton.jit  # type: ignore[untyped-decorator]
def merge_kernel(  # noqa: PLR0915  # A kernel's state cannot be handed around in parts.
    partial: Partial,
    rows: Rows,
    selected: Selected,
    thresholds_ptr: tl.tensor,
    output: Vectors,
    log_sum_exp_ptr: tl.tensor,
    sink_logits_ptr: tl.tensor | None,
    counts_ptr: tl.tensor,
    reported: ReportedShares,
    heads: Heads,
    token_bytes: tl.tensor,
    begins_early: tl.constexpr,
) -> None:
    """Merge the splits of one query head and add the share that it attended; the first of a group counts what was read.

    Grid: (rows × KV heads, group). Arguments are those of ``attend.gpu.attend``, with None where there are no
    thresholds, no sinks or no shares are reported; ``token_bytes``, those of a key and a value; and
    ``begins_early``, where the last kernel lets this one begin before it has ended.
    """
    if begins_early:
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(0)
    of_group = tl.program_id(1)
    row = pair // heads.kv_heads
    length = tl.load(rows.lengths + row)
    count = tl.load(selected.counts + pair)
    if count == _ELSEWHERE:
        return
    tokens = tl.where(count < 0, length, count)
    stops = tokens < 0
    if thresholds_ptr is not None:
        stops = (tl.load(thresholds_ptr + row * 3 + 2) < INFINITY) & (count != _TO_THE_END)
    splits = splits_of(tokens, stops)

    split = tl.arange(0, _PARTIAL_SLOTS)
    present = split < splits
    head = pair.to(tl.int64) * heads.group + of_group
    masses = tl.load(partial.masses + head * _PARTIAL_SLOTS + split, mask=present, other=-INFINITY)
    dim = tl.arange(0, heads.dim_block)
    outputs = tl.load(
        partial.outputs + (head * _PARTIAL_SLOTS + split[:, None]) * heads.head_dim + dim[None, :],
        mask=present[:, None] & (dim < heads.head_dim)[None, :],
        other=0.0,
    )
    highest = tl.max(masses, axis=0)
    weights = tl.exp2(masses - highest)
    total = tl.sum(weights, axis=0)
    merged = tl.sum(outputs * weights[:, None], axis=0) / total
    of_row = (pair % heads.kv_heads) * heads.group + of_group
    if sink_logits_ptr is not None:
        # The log-sum-exp stays that of the tokens.
        merged = merged / grown_by_sinks(sinks_log2(sink_logits_ptr, of_row, True), highest + tl.log2(total))
    target = output.pointer + row.to(tl.int64) * output.row_stride + of_row * output.head_stride
    tl.store(target + dim, merged.to(output.pointer.dtype.element_ty), mask=dim < heads.head_dim)
    mass = highest + tl.log2(total)
    tl.store(log_sum_exp_ptr + head, mass * LN_2)

    tiles = tl.cdiv(tokens, _TILE)
    read = tiles
    of_splits = split * 0
    if thresholds_ptr is not None:  # noqa: SIM102  # A condition of the launch and one of the row.
        if stops:
            of_splits = tl.load(partial.tiles_read + pair.to(tl.int64) * _PARTIAL_SLOTS + split, mask=present, other=0)
            read = tl.sum(of_splits, axis=0)
    if reported is not None:
        # What is selected weighs at least as much as what was read of it, and just that if it was read to the end.
        of_selected = tl.where(read < tiles, tl.maximum(tl.load(reported.beliefs + head * 2), mass), mass)
        unread = tl.exp2(of_selected - mass) - 1.0 + tl.exp2(tl.load(reported.beliefs + head * 2 + 1) - mass)
        tl.store(reported.shares + head, tl.load(reported.shares + head) + (1.0 / (1.0 + unread)).to(tl.float64))

    if of_group == 0:
        column = tl.arange(0, _COUNTS)
        amounts = tl.where(column == _CONTEXT, length, 0).to(tl.int64)
        amounts += tl.where(column == _CONTEXT_BYTES, length.to(tl.int64) * token_bytes, 0)
        attended = tokens
        if thresholds_ptr is not None:  # noqa: SIM102  # A condition of the launch and one of the row.
            if stops:
                # Of all tiles only a selection's last may hold fewer tokens; its split has read it if it read all.
                last = tiles - 1
                has_last = tl.sum(tl.where(split == last % splits, of_splits, 0), axis=0) > last // splits
                attended = read * _TILE - tl.where(has_last, tiles * _TILE - tokens, 0)
                amounts += tl.where(column == _TRAVERSALS, 1, 0)
                amounts += tl.where(column == _TERMINATED, (read < tiles).to(tl.int32), 0)
                amounts += tl.where(column == _TILES, tiles, 0)
                amounts += tl.where(column == _SKIPPED_TILES, tiles - read, 0)
        amounts += tl.where(column == _ATTENDED, attended, 0)
        amounts += tl.where(column == _READ_BYTES, attended.to(tl.int64) * token_bytes, 0)
        tl.atomic_add(counts_ptr + row * _COUNTS + column, amounts, mask=amounts != 0, sem="relaxed")
