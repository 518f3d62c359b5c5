"""Attention over selections in decode, for every policy and for batches that mix them (``winnow_kernels.attend``).

A selection is read in tiles of 64 tokens, gathered slot by slot or, where it is the whole context, page by page. The
query heads of a KV head's group, padded to 16, share one read of K and V, on tensor cores. What must be read is
2 × head dim × element size bytes and a 4-byte slot for each token; beside that, each split writes a float32 output and
a log-sum-exp per query head, which ``winnow_kernels.gpu.merge`` reads: 1/16 of K and V in splits of two tiles with a
group of 4 in bf16, less in longer ones. Two launches.

The grid is persistent: programs deal the splits of all rows out among themselves in turn, so that a long context in a
batch of short selections is spread over the device like everything else. Each finds its splits in the running sum of
the numbers of splits of all rows and KV heads.

Tiles are loaded asynchronously some ahead. With early termination, in a variant of the kernel that other batches do not
pay for, no tile is loaded before it is certain to be read: a split that has been calm for some tiles reads at least as
many more as its patience lacks, and decides again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.cache import LayerCache
from winnow_kernels.early_termination import PROBE, TILE
from winnow_kernels.gpu.batch import WHOLE_TO_THE_END, DecodeBatch, DeviceSelection
from winnow_kernels.gpu.merge import INFINITY, MOST_SPLITS, merge_kernel, splits_of, tiles_of_split

LARGEST_GROUP: Final = 16
"""Query heads of a KV head: the rows of a tensor core's tile, which smaller groups are padded to."""

_HEADS = tl.constexpr(LARGEST_GROUP)
_TILE = tl.constexpr(TILE)
_PROBE = tl.constexpr(PROBE)
_TO_THE_END = tl.constexpr(WHOLE_TO_THE_END)
_MOST_SPLITS = tl.constexpr(MOST_SPLITS)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_FOREVER = tl.constexpr(float(1 << 24))
_LOG2_E: Final = 1.4426950408889634


@dataclass(frozen=True)
class Launch:
    """How the kernel runs, which changes its speed; ``warps`` also the order of additions.

    Attributes:
        warps: of a program; the same with and without early termination, so that a row's result is too.
        tiles_ahead: how many tiles are loaded while one is attended to.
        programs: on each multiprocessor, of the persistent grid: as many as fit there.
        programs_with_termination: the same, of the variant with early termination, which needs more registers.
    """

    warps: int = 4
    tiles_ahead: int = 2
    programs: int = 3
    programs_with_termination: int = 2

    @classmethod
    def of(cls, head_dim: int, element_size: int) -> Launch:
        """Return what fits the registers and shared memory of a Hopper multiprocessor."""
        vector_bytes = triton.next_power_of_2(head_dim) * element_size
        if vector_bytes <= 128:
            return cls(tiles_ahead=3, programs=4, programs_with_termination=3)
        if vector_bytes <= 256:
            return cls()
        if vector_bytes <= 512:
            return cls(warps=8, programs=1, programs_with_termination=1)
        return cls(warps=8, tiles_ahead=1, programs=1, programs_with_termination=1)


@dataclass(frozen=True, eq=False)
class AttendBuffers:
    """What ``attend`` needs beside its arguments; one for all layers and batches, of up to as many rows.

    Attributes:
        log_sum_exp: float32 [rows, query heads], of the last call; natural logarithm, of the scaled scores read.
        partial_outputs: float32 [rows, query heads, splits, head dim].
        partial_masses: float32 [rows, query heads, splits]; log-sum-exp to base 2.
        tiles_read: int32 [rows, KV heads, splits]; of rows with early termination.
        multiprocessors: of the device.
        launch: how the kernel runs.
    """

    log_sum_exp: Tensor
    partial_outputs: Tensor
    partial_masses: Tensor
    tiles_read: Tensor
    multiprocessors: int
    launch: Launch

    @classmethod
    def empty(cls, rows: int, query_heads: int, cache: LayerCache, launch: Launch | None = None) -> AttendBuffers:
        """Return buffers for layers like ``cache``: 256 × rows × query heads × (head dim + 1) bytes and little.

        That is 270 MB for 256 rows of 32 query heads of 128.
        """
        device = cache.keys.device
        return cls(
            torch.empty(rows, query_heads, dtype=torch.float32, device=device),
            torch.empty(rows, query_heads, MOST_SPLITS, cache.head_dim, dtype=torch.float32, device=device),
            torch.empty(rows, query_heads, MOST_SPLITS, dtype=torch.float32, device=device),
            torch.empty(rows, cache.kv_heads, MOST_SPLITS, dtype=torch.int32, device=device),
            _multiprocessors(device),
            launch or Launch.of(cache.head_dim, cache.keys.element_size()),
        )

    @property
    def bytes(self) -> int:
        """Bytes of device memory."""
        return sum(t.nbytes for t in (self.log_sum_exp, self.partial_outputs, self.partial_masses, self.tiles_read))


def attend(
    queries: Tensor,
    cache: LayerCache,
    batch: DecodeBatch,
    selection: DeviceSelection,
    scale: float,
    thresholds: Tensor | None,
    buffers: AttendBuffers,
    output: Tensor,
) -> None:
    """Attend to what each row and KV head selected, and count it in ``batch.counts``, the context too.

    A row's result depends on that row alone. Whole contexts are read in order of position, and newest first by rows
    with early termination, as ``winnow_kernels.dense_step`` does. The log-sum-exp is left in ``buffers``.

    Args:
        queries: [rows, query heads, head dim], in the cache's dtype; query heads of a KV head, at most 16, lie next to
            each other. Rows and heads may be strided.
        cache: the layer's KV cache: bfloat16, float16 or float32, slots and heads strided alike in keys and values.
        batch: where the rows' contexts lie, in pages of at most 64 tokens.
        selection: contiguous, [rows, KV heads, width]; slots within the pool.
        scale: what scores are multiplied by before the softmax.
        thresholds: float32 [rows, 3], contiguous: scale, direction and patience of each row's early termination, with
            infinite patience where a row has none; None if no row has any.
        buffers: made for at least as many rows, and for layers like this.
        output: [rows, query heads, head dim]; rows and heads may be strided.
    """
    rows, query_heads, head_dim = queries.shape
    kv_heads = cache.kv_heads
    group = query_heads // kv_heads
    pairs = rows * kv_heads
    assert group <= LARGEST_GROUP
    assert batch.page_size <= TILE
    assert rows == batch.rows <= len(buffers.log_sum_exp)
    assert cache.keys.stride() == cache.values.stride()
    assert selection.slots.is_contiguous()
    assert selection.counts.is_contiguous()
    launch = buffers.launch
    programs = launch.programs if thresholds is None else launch.programs_with_termination
    # A tensor in its place, where no thresholds are read.
    own_thresholds = buffers.log_sum_exp if thresholds is None else thresholds
    shape = {
        "kv_heads": kv_heads,
        "group": group,
        "head_dim": head_dim,
        "padded_dim": triton.next_power_of_2(head_dim),
        "termination": thresholds is not None,
    }
    attend_kernel[(min(pairs * MOST_SPLITS, programs * buffers.multiprocessors),)](
        queries,
        cache.keys,
        cache.values,
        batch.page_table,
        batch.lengths,
        selection.slots,
        selection.counts,
        own_thresholds,
        buffers.partial_outputs,
        buffers.partial_masses,
        buffers.tiles_read,
        scale * _LOG2_E,
        pairs,
        queries.stride(0),
        queries.stride(1),
        cache.keys.stride(0),
        cache.keys.stride(1),
        batch.page_table.stride(0),
        selection.slots.shape[2],
        page_bits=batch.page_size.bit_length() - 1,
        padded_pairs=triton.next_power_of_2(pairs),
        tiles_ahead=launch.tiles_ahead,
        **shape,
        num_warps=launch.warps,
    )
    merge_kernel[(pairs, group)](
        buffers.partial_outputs,
        buffers.partial_masses,
        buffers.tiles_read,
        batch.lengths,
        selection.counts,
        own_thresholds,
        output,
        buffers.log_sum_exp,
        batch.counts,
        output.stride(0),
        output.stride(1),
        2 * cache.vector_bytes,
        **shape,
        num_warps=4,
    )


def _multiprocessors(device: torch.device) -> int:
    # In the interpreter, which runs programs one after another, few enough for each to have several splits.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def attend_kernel(  # noqa: PLR0915  # A kernel's state cannot be handed around in parts.
    queries_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    selected_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    partial_outputs_ptr: tl.tensor,
    partial_masses_ptr: tl.tensor,
    tiles_read_ptr: tl.tensor,
    scale_log2: tl.tensor,
    pairs: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    page_table_stride: tl.tensor,
    selection_width: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    termination: tl.constexpr,
    page_bits: tl.constexpr,
    padded_pairs: tl.constexpr,
    tiles_ahead: tl.constexpr,
) -> None:
    """Attend to splits of the batch's selections; a pair is a row and a KV head, number row × KV heads + KV head."""
    up_to = _splits_up_to(selected_ptr, lengths_ptr, thresholds_ptr, pairs, kv_heads, termination, padded_pairs)
    heads = tl.arange(0, _HEADS)
    dim = tl.arange(0, padded_dim)
    in_tile = tl.arange(0, _TILE)
    is_output = (heads < group)[:, None] & (dim < head_dim)[None, :]
    for item in range(tl.program_id(0), tl.max(up_to, axis=0), tl.num_programs(0)):
        pair = tl.sum((up_to <= item).to(tl.int32), axis=0)
        split = item - tl.max(tl.where(up_to <= item, up_to, 0), axis=0)
        row = pair // kv_heads
        kv_head = pair % kv_heads
        count = tl.load(selected_ptr + pair)
        whole = count < 0
        tokens = tl.where(whole, tl.load(lengths_ptr + row), count)
        stops = tokens < 0
        if termination:
            scale_bound = tl.load(thresholds_ptr + row * 3)
            direction_bound = tl.load(thresholds_ptr + row * 3 + 1)
            patience = tl.load(thresholds_ptr + row * 3 + 2)
            stops = (patience < INFINITY) & (count != _TO_THE_END)
        first, every, own = tiles_of_split(split, tokens, stops)

        # A selection is a table of pages of one slot.
        if whole:
            table_ptr = page_table_ptr + row.to(tl.int64) * page_table_stride
            slot_bits = page_bits
        else:
            table_ptr = slots_ptr + pair.to(tl.int64) * selection_width
            slot_bits = 0
        # The token that is read as number i has the position origin + direction × i in the table.
        origin = tl.where(whole & stops, tokens - 1, 0)
        direction = tl.where(whole & stops, -1, 1)
        # Tiles consist of whole pages, so this is the same in all.
        in_page = (origin + direction * in_tile) & ((1 << slot_bits) - 1)

        of_heads = (kv_head * group + heads)[:, None] * query_head_stride + dim[None, :]
        query = tl.load(queries_ptr + row.to(tl.int64) * query_row_stride + of_heads, mask=is_output, other=0.0)
        highest = tl.full([_HEADS], -INFINITY, tl.float32)
        mass = tl.zeros([_HEADS], tl.float32)
        weighted = tl.zeros([_HEADS, padded_dim], tl.float32)
        norm = tl.zeros([_HEADS], tl.float32)
        calm_tiles = 0.0
        done = 0
        while done < own:
            certain = own - done
            if termination:
                certain = tl.minimum(certain, _certain_tiles(done, calm_tiles, patience))
            for number in tl.range(done, done + certain, num_stages=2 * tiles_ahead + 1):
                begin = (first + number * every) * _TILE
                token = begin + in_tile
                page = tl.load(table_ptr + ((origin + direction * token) >> slot_bits), mask=token < tokens, other=0)
                slot = (page << slot_bits) + in_page
                # Not ``token < tokens``: what is known when pages are loaded would take registers until keys are.
                is_token = in_tile < tokens - begin
                offset = slot.to(tl.int64) * slot_stride + kv_head * kv_head_stride
                is_vector = is_token[:, None] & (dim < head_dim)[None, :]
                key = tl.load(keys_ptr + offset[:, None] + dim[None, :], mask=is_vector, other=0.0)
                value = tl.load(values_ptr + offset[:, None] + dim[None, :], mask=is_vector, other=0.0)
                before = weighted
                mass_before = mass
                highest, mass, weighted = _attend_tile(query, key, value, is_token, scale_log2, highest, mass, weighted)
                if termination:  # noqa: SIM102  # A condition of the launch and one of the row.
                    if stops:
                        before = before / tl.where(mass_before > 0, mass_before, 1.0)[:, None]
                        after = weighted / mass[:, None]
                        norm, is_calm = _compare(before, after, norm, dim, scale_bound, direction_bound, head_dim)
                        all_calm = tl.min((is_calm | (heads >= group)).to(tl.int32), axis=0) > 0
                        # The first tile has nothing to be compared with.
                        calm_tiles = tl.where((number > 0) & all_calm, calm_tiles + 1, 0.0)
            done += certain
            if termination:
                own = tl.where(calm_tiles >= patience, done, own)
        if termination:
            tl.store(tiles_read_ptr + pair.to(tl.int64) * _MOST_SPLITS + split, done)

        result = (pair.to(tl.int64) * group + heads) * _MOST_SPLITS + split
        tl.store(partial_masses_ptr + result, highest + tl.log2(mass), mask=heads < group)
        outputs_ptr = partial_outputs_ptr + result[:, None] * head_dim + dim[None, :]
        tl.store(outputs_ptr, weighted / mass[:, None], mask=is_output)


@triton.jit  # type: ignore[untyped-decorator]
def _splits_up_to(
    selected_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    pairs: tl.tensor,
    kv_heads: tl.constexpr,
    termination: tl.constexpr,
    padded_pairs: tl.constexpr,
) -> tl.tensor:
    """Return how many splits each pair and those before it have: int32 [padded pairs]."""
    pair = tl.arange(0, padded_pairs)
    row = pair // kv_heads
    count = tl.load(selected_ptr + pair, mask=pair < pairs, other=0)
    tokens = tl.where(count < 0, tl.load(lengths_ptr + row, mask=pair < pairs, other=0), count)
    stops = tokens < 0
    if termination:
        patience = tl.load(thresholds_ptr + row * 3 + 2, mask=pair < pairs, other=INFINITY)
        stops = (patience < INFINITY) & (count != _TO_THE_END)
    return tl.cumsum(splits_of(tokens, stops), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_tile(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    is_token: tl.tensor,
    scale_log2: tl.tensor,
    highest: tl.tensor,
    mass: tl.tensor,
    weighted: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return highest score (to base 2), mass relative to it, and values weighted so, with one more tile in them."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
    scores = tl.where(is_token[None, :], scores, -INFINITY)
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    fade = tl.exp2(highest - new_highest)
    weights = tl.exp2(scores - new_highest[:, None])
    mass = mass * fade + tl.sum(weights, axis=1)
    weighted = tl.dot(weights.to(value.dtype), value, weighted * fade[:, None], input_precision="ieee")
    return new_highest, mass, weighted


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

    As ``winnow_kernels.early_termination.tiles_read``.
    """
    step: tl.constexpr = head_dim // _PROBE if head_dim > _PROBE else 1
    is_probe = ((dim % step == 0) & (dim // step < _PROBE) & (dim < head_dim))[None, :]
    probe = tl.where(is_probe, after, 0.0)
    # Both sums in one reduction: it waits for other warps.
    squares, products = tl.split(tl.sum(tl.join(probe * probe, probe * before), axis=1))
    norm = tl.sqrt(squares)
    cosine = products / tl.maximum(norm_before * norm, _TINY)
    is_calm = tl.abs(norm - norm_before) <= scale_bound * norm_before
    return norm, is_calm & (1 - cosine <= direction_bound)
