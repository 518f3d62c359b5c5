"""Attention over selections in decode, for every policy and for batches that mix them (``attend.reference``).

A selection is read in tiles of 64 tokens, gathered slot by slot or, where it is the whole context, page by page. The
query heads of a KV head's group, padded to 8 or 16, share one read of K and V, on tensor cores. What must be read is
2 × head dim × element size bytes and a 4-byte slot for each token; beside that, each split writes a float32 output and
a log-sum-exp per query head, which ``attend.gpu_merge`` reads: 1/16 of K and V in splits of two tiles with a
group of 4 in bf16, less in longer ones. Two launches.

The grid is persistent: programs deal the splits of all rows out among themselves in turn, so that a long context in a
batch of short selections is spread over the device like everything else. Each finds its splits in the running sum of
the numbers of splits of all rows and KV heads.

Three loads wait for each other before the first tile has come: of counts, slots and keys. A program therefore goes
through the tiles of all its splits in one loop and loads tiles, and slots before them, some ahead across the ends of
splits: so it waits once. Early termination, where nobody knows in advance which tile is a split's last, has a kernel of
its own (``attend.gpu_early_termination``) that batches without it do not pay for.

For heads of 64 or 128 numbers of 16 or 8 bits and scores without a cap, ``attend.cuda`` does the same in CUDA C++.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.attend.cuda.kernel import CudaAttend, fits, serves
from winnow_kernels.attend.early_termination import TILE
from winnow_kernels.attend.gpu_early_termination import terminating_attend_kernel
from winnow_kernels.attend.gpu_merge import (
    INFINITY,
    PARTIAL_SLOTS,
    Partial,
    merge_kernel,
    run_of,
    spare_of,
    splits_of,
)
from winnow_kernels.attend.gpu_tile import attend_tile
from winnow_kernels.batch import DecodeBatch, DeviceSelection, ReportedShares
from winnow_kernels.cache import NARROW, LayerCache
from winnow_kernels.kernel_arguments import Heads, KeysAndValues, Rows, Selected, Vectors

LARGEST_GROUP: Final = 16
"""Query heads of a KV head, at most: the rows of a tensor core's tile."""

_TILE = tl.constexpr(TILE)
_PARTIAL_SLOTS = tl.constexpr(PARTIAL_SLOTS)
_LOG2_E: Final = 1.4426950408889634
# Half of a tensor core's tile takes half of the exponentials and of the shared memory for queries and outputs.
_HALF_GROUP: Final = LARGEST_GROUP // 2
_REGISTERS: Final = 64 << 10
_MAX_REGISTERS: Final = 255


@dataclass(frozen=True)
class Launch:
    """How the kernel runs, which changes its speed; ``warps`` also the order of additions.

    Attributes:
        warps: of a program; the same with and without early termination, so that a row's result is too.
        tiles_ahead: how many tiles are loaded while one is attended to.
        programs: on each multiprocessor, of the persistent grid: as many as fit there.
        programs_with_termination: the same, of the variant with early termination.
        tiles_ahead_with_termination: see there.
    """

    warps: int = 4
    tiles_ahead: int = 1
    programs: int = 4
    programs_with_termination: int = 2
    tiles_ahead_with_termination: int = 2

    @classmethod
    def of(cls, head_dim: int, element_size: int, group: int = 1) -> Launch:
        """Return what fits the registers and shared memory of a Hopper multiprocessor.

        Args:
            head_dim: elements of a key.
            element_size: bytes of one, as it is stored.
            group: query heads of a KV head.
        """
        # Registers hold narrow numbers as wider ones.
        vector_bytes = triton.next_power_of_2(head_dim) * max(element_size, torch.bfloat16.itemsize)
        if vector_bytes <= 128:
            launch = cls(tiles_ahead=3, tiles_ahead_with_termination=3)
        elif vector_bytes <= 256:
            launch = cls() if group <= _HALF_GROUP else cls(tiles_ahead=2, programs=2)
        else:
            ahead = 2 if vector_bytes <= 512 else 1
            launch = cls(8, ahead, programs=1, programs_with_termination=1, tiles_ahead_with_termination=ahead)
        if element_size >= torch.bfloat16.itemsize:
            return launch
        # Their tiles take half of the shared memory.
        return replace(
            launch,
            tiles_ahead=launch.tiles_ahead + 1,
            tiles_ahead_with_termination=launch.tiles_ahead_with_termination + 1,
        )

    def registers(self, programs: int) -> int | None:
        """Return how many registers a thread can have where several programs are to fit a multiprocessor."""
        return min(_MAX_REGISTERS, _REGISTERS // (programs * self.warps * 32) // 8 * 8) if programs > 1 else None


@dataclass(frozen=True, eq=False)
class AttendBuffers:
    """What ``attend`` needs beside its arguments; one for all layers and batches, of up to as many rows.

    Attributes:
        log_sum_exp: float32 [rows, query heads], of the last call; natural logarithm, of the scaled scores read.
        partial: what splits yield.
        multiprocessors: of the device.
        launch: how kernels in Triton run.
        cuda: the kernel in CUDA C++, instead of the one in Triton, for rows without early termination; None if there is
            none for such layers or the device.
    """

    log_sum_exp: Tensor
    partial: Partial
    multiprocessors: int
    launch: Launch
    cuda: CudaAttend | None = None

    @classmethod
    def empty(cls, rows: int, query_heads: int, cache: LayerCache, launch: Launch | None = None) -> AttendBuffers:
        """Return buffers for layers like ``cache``: 256 × rows × query heads × (head dim + 1) bytes and little.

        That is 270 MB for 256 rows of 32 query heads of 128.

        Args:
            rows: of a batch, at most.
            query_heads: of a layer.
            cache: a layer's.
            launch: for kernels in Triton alone, and how they run.

        Raises:
            RuntimeError: CUDA refuses the kernel in CUDA C++.
        """
        device = cache.keys.device
        in_cuda = launch is None and serves(cache, query_heads) and fits(device, cache, query_heads)
        return cls(
            torch.empty(rows, query_heads, dtype=torch.float32, device=device),
            Partial(
                torch.empty(rows, query_heads, PARTIAL_SLOTS, cache.head_dim, dtype=torch.float32, device=device),
                torch.empty(rows, query_heads, PARTIAL_SLOTS, dtype=torch.float32, device=device),
                torch.empty(rows, cache.kv_heads, PARTIAL_SLOTS, dtype=torch.int32, device=device),
            ),
            _multiprocessors(device),
            launch or Launch.of(cache.head_dim, cache.keys.element_size(), query_heads // cache.kv_heads),
            CudaAttend.on(device, cache, query_heads) if in_cuda else None,
        )

    @property
    def bytes(self) -> int:
        """Bytes of device memory."""
        return sum(t.nbytes for t in (self.log_sum_exp, *self.partial))


def attend(
    queries: Tensor,
    cache: LayerCache,
    batch: DecodeBatch,
    selection: DeviceSelection,
    scale: float,
    thresholds: Tensor | None,
    buffers: AttendBuffers,
    output: Tensor,
    reported: ReportedShares | None = None,
) -> None:
    """Attend to what each row and KV head selected, and count it in ``batch.counts``, the context too.

    A row's result depends on that row alone. Whole contexts are read in order of position, and newest first by rows
    with early termination, as ``winnow_kernels.policies.dense.reference`` does. The log-sum-exp is left in ``buffers``.

    Args:
        queries: [rows, query heads, head dim], in the cache's dtype, or any other of these if that is narrow; query
            heads of a KV head, at most 16, lie next to each other. Rows and heads may be strided.
        cache: the layer's KV cache: bfloat16, float16, float32 or narrow, slots and heads strided alike in keys and
            values; and its softmax's cap and sink logits, which cost nothing where there are none.
        batch: where the rows' contexts lie, in pages of at most 64 tokens.
        selection: contiguous, [rows, KV heads, width]; slots within the pool.
        scale: what scores are multiplied by before the softmax.
        thresholds: float32 [rows, 3], contiguous: scale, direction and patience of each row's early termination, with
            infinite patience where a row has none; None if no row has any.
        buffers: made for at least as many rows, and for layers like this.
        output: [rows, query heads, head dim]; rows and heads may be strided.
        reported: where the shares of the mass that were attended are added; None if none are reported.
    """
    rows, query_heads, _ = queries.shape
    pairs = rows * cache.kv_heads
    group = query_heads // cache.kv_heads
    assert group <= LARGEST_GROUP
    assert batch.page_size <= TILE
    assert rows == batch.rows <= len(buffers.log_sum_exp)
    launch = buffers.launch
    if queries.element_size() > torch.bfloat16.itemsize and cache.keys.dtype in NARROW:
        # Tiles are widened in shared memory, where they take what a cache as wide as the queries would.
        launch = Launch.of(cache.head_dim, queries.element_size(), group)
    of_multiprocessor, ahead = launch.programs, launch.tiles_ahead
    if thresholds is not None:
        of_multiprocessor, ahead = launch.programs_with_termination, launch.tiles_ahead_with_termination
    programs = min(pairs * PARTIAL_SLOTS, of_multiprocessor * buffers.multiprocessors)
    inputs = (Vectors.of(queries), KeysAndValues.of(cache))
    attended = (Rows.of(batch), Selected.of(selection))
    heads = Heads.of(query_heads, cache)
    tiling = {
        "padded_group": _HALF_GROUP if group <= _HALF_GROUP else LARGEST_GROUP,
        "padded_pairs": triton.next_power_of_2(pairs),
        "tiles_ahead": ahead,
        "num_warps": launch.warps,
        # Left alone, the compiler aims at other numbers of programs.
        "maxnreg": launch.registers(of_multiprocessor),
    }
    sink_logits = cache.softmax.sink_logits
    scaling = (scale * _LOG2_E, cache.softmax.cap_log2)
    cuda = buffers.cuda
    if cuda is not None and (cuda.dtype != queries.dtype or cache.softmax.cap is not None):
        cuda = None
    if cuda is not None:
        cuda.launch(queries, cache, batch, selection, scale * _LOG2_E, thresholds, buffers.partial)
    elif thresholds is None:
        attend_kernel[(programs,)](
            *inputs, *attended, buffers.partial, heads, *scaling, pairs, programs=programs, **tiling
        )
    if thresholds is not None:
        terminating_attend_kernel[(programs,)](
            *inputs,
            *attended,
            thresholds,
            buffers.partial,
            heads,
            *scaling,
            sink_logits,
            pairs,
            leaves_others=cuda is not None,
            **tiling,
        )
    begins_early = cuda is not None and thresholds is None and queries.is_cuda
    merge_kernel[(pairs, group)](
        buffers.partial,
        *attended,
        thresholds,
        Vectors.of(output),
        buffers.log_sum_exp,
        sink_logits,
        batch.counts,
        reported,
        heads,
        2 * cache.vector_bytes,
        begins_early=begins_early,
        num_warps=4,
        **({"launch_pdl": True} if begins_early else {}),
    )


def _multiprocessors(device: torch.device) -> int:
    # In the interpreter, which runs programs one after another, few enough for each to have several splits.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def attend_kernel(  # noqa: PLR0915  # A kernel's state cannot be handed around in parts.
    queries: Vectors,
    cache: KeysAndValues,
    rows: Rows,
    selected: Selected,
    partial: Partial,
    heads: Heads,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    pairs: tl.tensor,
    padded_group: tl.constexpr,
    padded_pairs: tl.constexpr,
    programs: tl.constexpr,
    tiles_ahead: tl.constexpr,
) -> None:
    """Attend to splits of the batch's selections; a pair is a row and a KV head, number row × KV heads + KV head.

    Grid: ``programs``.
    """
    all_pairs = tl.arange(0, padded_pairs)
    all_counts = tl.load(selected.counts + all_pairs, mask=all_pairs < pairs, other=0)
    all_lengths = tl.load(rows.lengths + all_pairs // heads.kv_heads, mask=all_pairs < pairs, other=0)
    all_tokens = tl.where(all_counts < 0, all_lengths, all_counts)
    all_splits = splits_of(all_tokens, all_tokens < 0)
    up_to = tl.cumsum(all_splits, axis=0)
    own_tiles = tl.sum(_own_tiles(tl.cdiv(all_tokens, _TILE), all_splits, up_to, programs), axis=0)

    member = tl.arange(0, padded_group)
    dim = tl.arange(0, heads.dim_block)
    in_tile = tl.arange(0, _TILE)
    is_output = (member < heads.group)[:, None] & (dim < heads.head_dim)[None, :]
    highest = tl.full([padded_group], -INFINITY, tl.float32)
    masses = tl.zeros([padded_group, _TILE], tl.float32)
    weighted = tl.zeros([padded_group, heads.dim_block], tl.float32)
    # Before the first split, which the first step finds.
    item = tl.program_id(0) - programs
    pair = 0
    split = 0
    count = 0
    tokens = 0
    tile = 0
    last = 0
    # Half of the stages load slots ahead of keys. What decides which tile is next is in the ``if`` alone: the compiler
    # runs ahead with it.
    for _step in tl.range(0, own_tiles, num_stages=2 * tiles_ahead + 1):
        if tile == last:
            item += programs
            is_before = up_to <= item
            pair = tl.sum(is_before.to(tl.int32), axis=0)
            split = item - tl.max(tl.where(is_before, up_to, 0), axis=0)
            count = tl.load(selected.counts + pair)
            tokens = tl.where(count < 0, tl.load(rows.lengths + pair // heads.kv_heads), count)
            tiles = tl.cdiv(tokens, _TILE)
            run = run_of(tiles)
            tile = split * run
            last = tl.where(tiles - (tile + run) <= spare_of(run), tiles, tile + run) - 1
        else:
            tile += 1
        row = (pair // heads.kv_heads).to(tl.int64)
        kv_head = pair % heads.kv_heads

        # A selection is a table of pages of one slot.
        if count < 0:
            table_ptr = rows.page_table + row * rows.table_stride
            slot_bits = rows.page_bits
        else:
            table_ptr = selected.slots + tl.cast(pair, tl.int64) * selected.width
            slot_bits = 0
        token = tile * _TILE + in_tile
        page = tl.load(table_ptr + (token >> slot_bits), mask=token < tokens, other=0)
        # Tiles consist of whole pages, so what is added is the same in all.
        slot = (page << slot_bits) + (in_tile & ((1 << slot_bits) - 1))
        # Not ``token < tokens``: what is known when pages are loaded would take registers until keys are.
        is_token = in_tile < tokens - tile * _TILE
        offset = slot.to(tl.int64) * cache.slot_stride + kv_head * cache.head_stride
        is_vector = is_token[:, None] & (dim < heads.head_dim)[None, :]
        of_heads = (kv_head * heads.group + member)[:, None] * queries.head_stride + dim[None, :]
        query = tl.load(queries.pointer + row * queries.row_stride + of_heads, mask=is_output, other=0.0)
        key = tl.load(cache.keys_ptr + offset[:, None] + dim[None, :], mask=is_vector, other=0.0)
        value = tl.load(cache.values_ptr + offset[:, None] + dim[None, :], mask=is_vector, other=0.0)
        highest, masses, weighted = attend_tile(
            query, key, value, is_token, scale_log2, cap_log2, highest, masses, weighted
        )

        # One number to keep until the tile has come: where the split's result goes, if this was its last tile.
        result = tl.where(tile == last, pair * (heads.group * _PARTIAL_SLOTS) + split, -1)
        if result >= 0:
            mass = tl.sum(masses, axis=1)
            of_split = result.to(tl.int64) + member * _PARTIAL_SLOTS
            tl.store(partial.masses + of_split, highest + tl.log2(mass), mask=member < heads.group)
            outputs_ptr = partial.outputs + of_split[:, None] * heads.head_dim + dim[None, :]
            tl.store(outputs_ptr, weighted / mass[:, None], mask=is_output)
            highest = tl.full([padded_group], -INFINITY, tl.float32)
            masses = tl.zeros([padded_group, _TILE], tl.float32)
            weighted = tl.zeros([padded_group, heads.dim_block], tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _own_tiles(tiles: tl.tensor, splits: tl.tensor, up_to: tl.tensor, programs: tl.constexpr) -> tl.tensor:
    """Return how many of each pair's tiles are in splits of this program: int32 [padded pairs].

    Args:
        tiles: int32 [padded pairs].
        splits: int32 [padded pairs].
        up_to: int32 [padded pairs]; splits of a pair and those before it.
        programs: of the grid; program p has the splits p, p + programs, …
    """
    program = tl.program_id(0)
    own_up_to = tl.cdiv(up_to - program, programs)
    own = own_up_to - tl.cdiv(up_to - splits - program, programs)
    run = run_of(tiles)
    # A pair's last split may have other than ``run`` tiles.
    has_last = (own > 0) & (program + (own_up_to - 1) * programs == up_to - 1)
    return own * run + tl.where(has_last, tiles - splits * run, 0)
