"""QUOKA's selection in decode (``reference.QuokaStep``).

Scoring reads the codes of all keys before the newest page, a fourteenth of the bytes of dense attention with 2 bits,
beside a mean query for each KV head, which a first launch has rounded. Then ``select_by_grade`` selects. A grade is a
cosine in the reference's steps, from 0 on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import DecodeBatch, DeviceSelection
from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.gpu_key_codes import Codes, factor_of_mean
from winnow_kernels.indexes.key_codes import BLOCK, MEAN_BITS, QUERY_LEVELS, KeyCodes, bytes_of_key, length_of_factor
from winnow_kernels.kernel_arguments import Constant, Pointer, Rows, Vectors
from winnow_kernels.policies.lowbit_top_p.gpu.prepare import rotated
from winnow_kernels.policies.lowbit_top_p.gpu.scores import block_at, query_of, scores_of_tile
from winnow_kernels.policies.lowbit_top_p.gpu.selection import Launch
from winnow_kernels.policies.lowbit_top_p.gpu.state import Shape
from winnow_kernels.policies.quoka.reference import COSINE_STEPS
from winnow_kernels.selection.gpu_grades import GRADES, SAMPLE_GRADES, SAMPLED, GradeBuffers, select_by_grade
from winnow_kernels.selection.gpu_partition import own_share, owner_of, programs_on
from winnow_kernels.selection.gpu_top import TopRows, token_counts

assert GRADES == 2 * COSINE_STEPS

# Of a multiprocessor; and of each program, for what is small, and for CUDA.
_SHARED_BYTES: Final = 227 * 1024
_RESERVED_BYTES: Final = 2048
_BLOCK = tl.constexpr(BLOCK)
_GRADES = tl.constexpr(GRADES)
_BINS = tl.constexpr(GRADES // SAMPLE_GRADES)
_SAMPLED = tl.constexpr(SAMPLED)
_SAMPLE_GRADES = tl.constexpr(SAMPLE_GRADES)
_COSINE_STEPS = tl.constexpr(float(COSINE_STEPS))
_LEVELS = tl.constexpr(float(QUERY_LEVELS))
# As torch.nn.functional.normalize.
_MIN_NORM = tl.constexpr(1e-12)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


class MeanQueries(NamedTuple):
    """Scratch: the mean query of each row and KV head, as it scores codes.

    Attributes:
        levels: int8 [rows, KV heads, head dim].
        sums: int32 [rows, KV heads]; of the levels.
        worths: float32 [rows, KV heads]; 1.
        scales: float32 [rows, KV heads]; what a product is multiplied with, to be a key's length times its cosine's
            steps.
    """

    levels: Pointer
    sums: Pointer
    worths: Pointer
    scales: Pointer

    @classmethod
    def empty(cls, rows: int, kv_heads: int, head_dim: int, device: torch.device) -> MeanQueries:
        """Return those of ``rows`` rows."""
        return cls(
            levels=torch.zeros(rows, kv_heads, head_dim, dtype=torch.int8, device=device),
            sums=torch.zeros(rows, kv_heads, dtype=torch.int32, device=device),
            worths=torch.ones(rows, kv_heads, dtype=torch.float32, device=device),
            scales=torch.zeros(rows, kv_heads, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, eq=False)
class Scratch:
    """Scratch of so many rows, the same in all layers."""

    queries: MeanQueries
    grades: GradeBuffers

    @classmethod
    def empty(cls, rows: int, kv_heads: int, head_dim: int, tokens: int, width: int, device: torch.device) -> Scratch:
        """Return scratch for contexts of up to ``tokens`` tokens and selections of up to ``width``."""
        grades = GradeBuffers.empty(rows, kv_heads, tokens, width, device)
        return cls(MeanQueries.empty(rows, kv_heads, head_dim, device), grades)

    @property
    def bytes(self) -> int:
        """Bytes of device memory."""
        return sum(tensor.nbytes for tensor in self.queries) + self.grades.bytes


class _Lengths(NamedTuple):
    """How long a residual and a mean are, over their factors (``length_of_factor``)."""

    residual: Constant
    mean: Constant


def select(
    layer: int,
    queries: Tensor,
    cache: LayerCache,
    index: KeyCodes,
    batch: DecodeBatch,
    rows: TopRows,
    selection: DeviceSelection,
    scratch: Scratch,
    *,
    any_by_score: bool,
    launch: Launch | None = None,
) -> None:
    """Write the slots and counts of the rows of this kind in a layer, and count the codes that are read.

    What order they are in, ``select_by_grade`` says.

    Args:
        layer: its number.
        queries: [rows, query heads, head dim]; rows and heads may be strided.
        cache: the layer's KV cache.
        index: codes of all layers' keys; those of complete pages stand.
        batch: the batch.
        rows: parameters of its rows.
        selection: what is written to.
        scratch: of as many rows, at least.
        any_by_score: whether ``rows.by_score`` may be set for any row.
        launch: how scoring runs.
    """
    kv_heads, head_dim = cache.kv_heads, cache.head_dim
    launch = launch or launch_of(head_dim, index.bits, in_words=queries.is_cuda)
    # A mean query for each KV head.
    shape = Shape.of(kv_heads, 1)
    width, pairs = selection.slots.shape[2], batch.rows * kv_heads
    codes, of_rows = index.arguments(layer), (Rows.of(batch), rows)
    _prepare_kernel[(batch.rows, kv_heads)](
        Vectors.of(queries),
        index.turn,
        *of_rows,
        scratch.queries,
        scratch.grades,
        width,
        group=queries.shape[1] // kv_heads,
        head_dim=head_dim,
        dim_block=max(16, triton.next_power_of_2(head_dim)),
        num_warps=8,
    )
    _score_kernel[(programs_on(queries.device, launch.programs),)](
        *of_rows,
        codes,
        shape,
        scratch.queries,
        scratch.grades,
        _Lengths(*(tl.constexpr(length_of_factor(bits)) for bits in (index.bits, MEAN_BITS))),
        pairs,
        width,
        pair_block=triton.next_power_of_2(pairs),
        tile=launch.tile,
        stages=launch.stages,
        in_words=launch.in_words,
        num_warps=launch.warps,
        # Fused, a product is not rounded before it is added, as the reference's is.
        enable_fp_fusion=False,
    )
    key_bytes = bytes_of_key(head_dim, index.bits)
    select_by_grade(batch, rows, selection, scratch.grades, key_bytes, any_by_score=any_by_score)


def launch_of(head_dim: int, bits: int, *, in_words: bool) -> Launch:
    """Return how scoring runs: as for the low-bit policies, with as many programs as their shared memory allows.

    Eight tokens share a row of the matrix units, so that a query's levels take eight times the room.
    """
    launch = Launch.of(head_dim, bits, 1, in_words=in_words)
    channels = triton.next_power_of_2(head_dim)
    levels = channels * (136 if bits == 3 else 72)
    tiles = 2 * launch.tile * (channels * bits // 8 + channels // 32 + 4)
    return replace(launch, programs=min(launch.programs, _SHARED_BYTES // (levels + tiles + _RESERVED_BYTES)))


@triton.jit  # type: ignore[untyped-decorator]
def _prepare_kernel(
    queries: Vectors,
    rotation_ptr: tl.tensor,
    rows: Rows,
    parameters: TopRows,
    means: MeanQueries,
    buffers: GradeBuffers,
    width: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
) -> None:
    """Round the mean of a group's normalised queries, and begin with counts of 0. Grid: rows × KV heads."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _earlier, _sinks, wanted, count = token_counts(parameters, rows, row, True)
    if (wanted < 0) | (count > width):
        return
    pair = row * tl.num_programs(1) + kv_head
    tl.store(buffers.samples + pair * _BINS + tl.arange(0, _BINS), tl.zeros([_BINS], tl.int32))
    tl.store(buffers.histograms + pair * _GRADES + tl.arange(0, _GRADES), tl.zeros([_GRADES], tl.int32))
    query_ptr = queries.pointer + row * queries.row_stride + kv_head * group * queries.head_stride
    turned = rotated(query_ptr, queries, rotation_ptr, group, head_dim, dim_block)
    # Rotated, they are √head dim times as long.
    lengths = tl.sqrt(tl.sum(turned * turned, 1) / head_dim)
    mean = tl.sum(turned * (1.0 / (tl.maximum(lengths, _MIN_NORM) * group))[:, None], 0)
    step = tl.div_rn(tl.max(tl.abs(mean), 0), _LEVELS)
    levels = tl.floor(tl.div_rn(mean, tl.maximum(step, _TINY)) + 0.5)
    dim = tl.arange(0, dim_block)
    tl.store(means.levels + pair * head_dim + dim, levels.to(tl.int8), mask=dim < head_dim)
    tl.store(means.sums + pair, tl.sum(levels, 0).to(tl.int32))
    length = tl.sqrt_rn(tl.sum(levels * levels, 0) * head_dim)
    tl.store(means.scales + pair, tl.div_rn(_COSINE_STEPS, tl.maximum(length, 1.0)))


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def _score_kernel(
    rows: Rows,
    parameters: TopRows,
    codes: Codes,
    shape: Shape,
    means: MeanQueries,
    buffers: GradeBuffers,
    lengths: _Lengths,
    pairs: tl.tensor,
    width: tl.tensor,
    pair_block: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
    in_words: tl.constexpr,
) -> None:
    """Grade the tokens before the newest page; a pair is a row and a KV head, number row × KV heads + KV head.

    What stands behind them is graded too, up to the end of its tile.
    """
    line, column = tl.arange(0, tile // shape.columns), tl.arange(0, shape.columns)
    number = line[:, None] * shape.columns + column[None, :]
    all_pairs = tl.arange(0, pair_block)
    in_batch = all_pairs < pairs
    earlier, _all_sinks, wanted, count = token_counts(parameters, rows, all_pairs // shape.kv_heads, in_batch)
    tiles = tl.where((wanted >= 0) & (count <= width), tl.cdiv(earlier, tile), 0)
    own, end = own_share(tiles)
    while own < end:
        pair, first, after = owner_of(own, tiles)
        last = tl.minimum(end, after)
        of_pair = pair.to(tl.int64)
        row, kv_head = (pair // shape.kv_heads).to(tl.int64), pair % shape.kv_heads
        scored, sinks, _wanted, _count = token_counts(parameters, rows, row, True)
        query = query_of(means, pair, codes, shape)
        scale = tl.load(means.scales + of_pair)
        grades_ptr = buffers.grades + of_pair * buffers.tokens + number
        sample_ptr = buffers.samples + of_pair * _BINS
        behind = tl.minimum((last - first) * tile, scored)
        for begin in tl.range((own - first) * tile, behind, tile, num_stages=stages):
            products = scores_of_tile(rows, row, kv_head, begin, scored, 0, codes, shape, query, tile, in_words)
            norms = _norms_of_tile(rows, row, kv_head, begin, scored, codes, shape, lengths, tile)
            steps = tl.floor(tl.div_rn(products * scale, tl.maximum(norms, _TINY)))
            grades = (tl.minimum(tl.maximum(steps, -_COSINE_STEPS), _COSINE_STEPS - 1) + _COSINE_STEPS).to(tl.int32)
            tl.store(grades_ptr + begin, grades.to(tl.int16))
            # What is sampled stands first in its line.
            of_lines = tl.sum(tl.where(column[None, :] == 0, grades, 0), 1)
            place = begin + line * shape.columns
            is_sampled = (place % _SAMPLED == 0) & (place >= sinks) & (place < scored)
            tl.atomic_add(sample_ptr + of_lines // _SAMPLE_GRADES, 1, mask=is_sampled, sem="relaxed")
        own = last


@triton.jit  # type: ignore[untyped-decorator]
def _norms_of_tile(
    rows: Rows,
    row: tl.tensor,
    kv_head: tl.tensor,
    begin: tl.tensor,
    scored: tl.tensor,
    codes: Codes,
    shape: Shape,
    lengths: _Lengths,
    tile: tl.constexpr,
) -> tl.tensor:
    """Return how long a tile's keys are, nearly (``KeyCodes.norms``): float32 [lines, columns], token by token.

    ``scores_of_tile`` loads the factors, too: compiled, both are one load.
    """
    in_block: tl.constexpr = _BLOCK // shape.columns
    line = tl.arange(0, tile // shape.columns)
    line_block = block_at(rows, row, begin, line // in_block, scored) * codes.kv_heads + kv_head
    blocks: tl.constexpr = tile // _BLOCK
    block = tl.max(tl.reshape(line_block, [blocks, in_block]), 1)
    of_block = codes.factors + (block * (codes.block_bytes // 2))[:, None] + tl.arange(0, _BLOCK)[None, :]
    means = factor_of_mean(tl.load(of_block)) * lengths.mean
    means = tl.reshape(tl.broadcast_to(means[:, None], [blocks, in_block]), [tile // shape.columns])
    line_factors = line_block * (codes.block_bytes // 2) + line % in_block * shape.columns
    in_row = tl.arange(0, shape.columns)
    residuals = tl.load(codes.factors + line_factors[:, None] + in_row[None, :]).to(tl.float32) * lengths.residual
    return tl.sqrt_rn(residuals * residuals + (means * means)[:, None])
