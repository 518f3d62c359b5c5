"""The variant of ``attend.gpu`` for batches in which some row terminates early.

Tiles are loaded asynchronously some ahead, but none before it is certain to be read: a split that has been calm for
some tiles reads at least as many more as its patience lacks, and decides again. So loading starts anew with each split
and each decision; a row without early termination pays that too when its batch has one with it, and gets the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from winnow_kernels.attend.early_termination import PROBE, TILE
from winnow_kernels.attend.gpu_merge import INFINITY, PARTIAL_SLOTS, Partial, splits_of, tiles_of_split
from winnow_kernels.attend.gpu_softmax import sinks_log2
from winnow_kernels.attend.gpu_tile import attend_tile
from winnow_kernels.batch import WHOLE_TO_THE_END
from winnow_kernels.kernel_arguments import Heads, KeysAndValues, Rows, Selected, Vectors

_TILE = tl.constexpr(TILE)
_PROBE = tl.constexpr(PROBE)
_TO_THE_END = tl.constexpr(WHOLE_TO_THE_END)
_PARTIAL_SLOTS = tl.constexpr(PARTIAL_SLOTS)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_FOREVER = tl.constexpr(float(1 << 24))


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def terminating_attend_kernel(  # noqa: PLR0915  # A kernel's state cannot be handed around in parts.
    queries: Vectors,
    cache: KeysAndValues,
    rows: Rows,
    selected: Selected,
    thresholds_ptr: tl.tensor,
    partial: Partial,
    heads: Heads,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    sink_logits_ptr: tl.tensor | None,
    pairs: tl.tensor,
    padded_group: tl.constexpr,
    padded_pairs: tl.constexpr,
    tiles_ahead: tl.constexpr,
    leaves_others: tl.constexpr,
) -> None:
    """Attend to splits of the batch's selections; a pair is a row and a KV head, number row × KV heads + KV head.

    Grid: as many programs as fit the device. Arguments are those of ``attend.gpu.attend_kernel``, and
    the thresholds of ``attend``. Where another kernel attends for rows that cannot terminate, it ``leaves_others``.
    """
    up_to = _splits_up_to(selected, rows, thresholds_ptr, heads, pairs, padded_pairs, leaves_others)
    member = tl.arange(0, padded_group)
    dim = tl.arange(0, heads.dim_block)
    in_tile = tl.arange(0, _TILE)
    is_output = (member < heads.group)[:, None] & (dim < heads.head_dim)[None, :]
    for item in range(tl.program_id(0), tl.max(up_to, axis=0), tl.num_programs(0)):
        pair = tl.sum((up_to <= item).to(tl.int32), axis=0)
        split = item - tl.max(tl.where(up_to <= item, up_to, 0), axis=0)
        row = pair // heads.kv_heads
        kv_head = pair % heads.kv_heads
        count = tl.load(selected.counts + pair)
        whole = count < 0
        tokens = tl.where(whole, tl.load(rows.lengths + row), count)
        scale_bound = tl.load(thresholds_ptr + row * 3)
        direction_bound = tl.load(thresholds_ptr + row * 3 + 1)
        patience = tl.load(thresholds_ptr + row * 3 + 2)
        stops = (patience < INFINITY) & (count != _TO_THE_END)
        first, every, own = tiles_of_split(split, tokens, stops)

        # A selection is a table of pages of one slot.
        if whole:
            table_ptr = rows.page_table + row.to(tl.int64) * rows.table_stride
            slot_bits = rows.page_bits
        else:
            table_ptr = selected.slots + pair.to(tl.int64) * selected.width
            slot_bits = 0
        # The token that is read as number i has the position origin + direction × i in the table.
        origin = tl.where(whole & stops, tokens - 1, 0)
        direction = tl.where(whole & stops, -1, 1)
        # Tiles consist of whole pages, so this is the same in all.
        in_page = (origin + direction * in_tile) & ((1 << slot_bits) - 1)

        of_heads = (kv_head * heads.group + member)[:, None] * queries.head_stride + dim[None, :]
        query = tl.load(queries.pointer + row.to(tl.int64) * queries.row_stride + of_heads, mask=is_output, other=0.0)
        highest = tl.full([padded_group], -INFINITY, tl.float32)
        masses = tl.zeros([padded_group, _TILE], tl.float32)
        weighted = tl.zeros([padded_group, heads.dim_block], tl.float32)
        if sink_logits_ptr is not None:
            sinks = sinks_log2(sink_logits_ptr, kv_head * heads.group + member, member < heads.group)
        mass = tl.zeros([padded_group], tl.float32)
        norm = tl.zeros([padded_group], tl.float32)
        calm_tiles = 0.0
        done = 0
        while done < own:
            certain = tl.minimum(own - done, _certain_tiles(done, calm_tiles, patience))
            for number in tl.range(done, done + certain, num_stages=2 * tiles_ahead + 1):
                begin = (first + number * every) * _TILE
                token = begin + in_tile
                page = tl.load(table_ptr + ((origin + direction * token) >> slot_bits), mask=token < tokens, other=0)
                slot = (page << slot_bits) + in_page
                # Not ``token < tokens``: what is known when pages are loaded would take registers until keys are.
                is_token = in_tile < tokens - begin
                offset = slot.to(tl.int64) * cache.slot_stride + kv_head * cache.head_stride
                is_vector = is_token[:, None] & (dim < heads.head_dim)[None, :]
                key = tl.load(cache.keys_ptr + offset[:, None] + dim[None, :], mask=is_vector, other=0.0)
                value = tl.load(cache.values_ptr + offset[:, None] + dim[None, :], mask=is_vector, other=0.0)
                before = weighted
                highest, masses, weighted = attend_tile(
                    query, key, value, is_token, scale_log2, cap_log2, highest, masses, weighted
                )
                if stops:
                    before = before / tl.where(mass > 0, mass, 1.0)[:, None]
                    mass = tl.sum(masses, axis=1)
                    if sink_logits_ptr is not None:
                        # The probe is of the output with the whole sink.
                        mass += tl.exp2(sinks - highest)
                    after = weighted / mass[:, None]
                    norm, is_calm = _compare(before, after, norm, dim, scale_bound, direction_bound, heads.head_dim)
                    all_calm = tl.min((is_calm | (member >= heads.group)).to(tl.int32), axis=0) > 0
                    # The first tile has nothing to be compared with.
                    calm_tiles = tl.where((number > 0) & all_calm, calm_tiles + 1, 0.0)
            done += certain
            own = tl.where(calm_tiles >= patience, done, own)
        tl.store(partial.tiles_read + pair.to(tl.int64) * _PARTIAL_SLOTS + split, done)

        mass = tl.sum(masses, axis=1)
        result = (pair.to(tl.int64) * heads.group + member) * _PARTIAL_SLOTS + split
        tl.store(partial.masses + result, highest + tl.log2(mass), mask=member < heads.group)
        outputs_ptr = partial.outputs + result[:, None] * heads.head_dim + dim[None, :]
        tl.store(outputs_ptr, weighted / mass[:, None], mask=is_output)


@triton.jit  # type: ignore[untyped-decorator]
def _splits_up_to(
    selected: Selected,
    rows: Rows,
    thresholds_ptr: tl.tensor,
    heads: Heads,
    pairs: tl.tensor,
    padded_pairs: tl.constexpr,
    leaves_others: tl.constexpr,
) -> tl.tensor:
    """Return how many splits each pair and those before it have: int32 [padded pairs]."""
    pair = tl.arange(0, padded_pairs)
    row = pair // heads.kv_heads
    count = tl.load(selected.counts + pair, mask=pair < pairs, other=0)
    tokens = tl.where(count < 0, tl.load(rows.lengths + row, mask=pair < pairs, other=0), count)
    patience = tl.load(thresholds_ptr + row * 3 + 2, mask=pair < pairs, other=INFINITY)
    stops = (patience < INFINITY) & (count != _TO_THE_END)
    splits = splits_of(tokens, stops)
    if leaves_others:
        splits = tl.where(stops, splits, 0)
    return tl.cumsum(splits, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _certain_tiles(done: tl.tensor, calm_tiles: tl.tensor, patience: tl.tensor) -> tl.tensor:
    """Return how many tiles a split must still read before it can stop: those may be loaded ahead."""
    lacking = tl.ceil(tl.minimum(patience - calm_tiles, _FOREVER)).to(tl.int32)
    # The first tile has nothing to be compared with.
    return tl.maximum(lacking, 1) + tl.where(done == 0, 1, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _compare(
    before: tl.tensor,
    after: tl.tensor,
    norm_before: tl.tensor,
    dim: tl.tensor,
    scale_bound: tl.tensor,
    direction_bound: tl.tensor,
    head_dim: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return each head's norm of the probe after a tile, and whether the tile was calm for it.

    As ``attend.early_termination.tiles_read``.
    """
    # Element i of the probe is number i * head_dim // _PROBE: this is one if that of its own i is.
    number = tl.cdiv(dim * _PROBE, head_dim)
    is_probe = ((number * head_dim // _PROBE == dim) & (dim < head_dim))[None, :]
    probe = tl.where(is_probe, after, 0.0)
    # Both sums in one reduction: it waits for other warps.
    squares, products = tl.split(tl.sum(tl.join(probe * probe, probe * before), axis=1))
    norm = tl.sqrt(squares)
    cosine = products / tl.maximum(norm_before * norm, _TINY)
    is_calm = tl.abs(norm - norm_before) <= scale_bound * norm_before
    return norm, is_calm & (1 - cosine <= direction_bound)
