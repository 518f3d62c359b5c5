"""Launching the selection of a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import triton
from torch import Tensor

from winnow_kernels.batch import DeviceSelection
from winnow_kernels.decode.coded_tokens import WINDOW
from winnow_kernels.decode.predicted_attention import STEPS
from winnow_kernels.indexes.key_codes import bytes_of_key
from winnow_kernels.kernel_arguments import Counts, Rows, Selected, Vectors
from winnow_kernels.policies.lowbit_top_p.gpu.choice import count_kernel, cut_kernel, keep_kernel, write_kernel
from winnow_kernels.policies.lowbit_top_p.gpu.cuda.kernels import CudaKernels
from winnow_kernels.policies.lowbit_top_p.gpu.layer import Layer
from winnow_kernels.policies.lowbit_top_p.gpu.order import (
    cap_kernel,
    order_count_kernel,
    order_kernel,
    order_scan_kernel,
)
from winnow_kernels.policies.lowbit_top_p.gpu.prepare import prepare_kernel
from winnow_kernels.policies.lowbit_top_p.gpu.scores import score_kernel
from winnow_kernels.policies.lowbit_top_p.gpu.state import ORDERS, Anchors, Scratch, Shape
from winnow_kernels.policies.lowbit_top_p.gpu.totals import total_kernel
from winnow_kernels.selection.gpu_partition import programs_on

_LOG2_E: Final = 1.4426950408889634
# Steps of the order whose counts a program adds up over chunks.
_SCANNED_STEPS: Final = 32
# Programs of one warp on each multiprocessor that wait for nobody.
_ALONE: Final = 24
# Those that may wait for others of their pair: so many that all run at once.
_MEETING: Final = 16
_REGISTERS: Final = 64 << 10
# No dearer than fewer: a warp looks at so many at once.
_MIN_ROW_BLOCK: Final = 32


@dataclass(frozen=True)
class Launch:
    """How scoring runs, which changes its speed.

    Attributes:
        tile: tokens that a program scores at a time.
        warps: of a program.
        stages: tiles that are under way at a time.
        programs: on each multiprocessor.
        in_words: whether bytes are taken four at a time, which the interpreter cannot.
    """

    tile: int = 256
    warps: int = 1
    stages: int = 5
    programs: int = 8
    in_words: bool = True

    @classmethod
    def of(cls, head_dim: int, bits: int, group: int, *, in_words: bool) -> Launch:
        """Return what fits the registers of a single warp, which waits for no other."""
        padded = triton.next_power_of_2(group)
        of_token = triton.next_power_of_2(head_dim) * bits * max(8, padded) // 8
        tile = 256 if of_token <= 256 else 128 if of_token <= 512 else 64
        return cls(tile=min(tile, 1024 // padded), in_words=in_words)


def select(
    layer: Layer,
    scratch: Scratch,
    anchors: Anchors,
    selection: DeviceSelection,
    beliefs: Tensor,
    capped: Tensor,
    *,
    in_order: bool,
    by_key: bool,
    launch: Launch | None = None,
    cuda: CudaKernels | None = None,
) -> None:
    """Write slots, counts and beliefs of the rows that act.

    Args:
        layer: what is selected in.
        scratch: of as many rows, at least.
        anchors: of the layer.
        selection: what is written to.
        beliefs: float32 [rows, query heads, 2]; ``ReportedShares.beliefs``.
        capped: int32 [rows]; gets a 1 where a selection is cut short.
        in_order: whether the order of a selection may matter.
        by_key: whether rows have fixed budgets (``lowbit_top_k``), or shares.
        launch: how scoring runs.
        cuda: kernels that list and take, instead of those in Triton; for as many rows as ``scratch``, not ``by_key``,
            nor where scores have a cap.
    """
    query_heads = layer.queries.shape[1]
    launch = launch or Launch.of(
        layer.cache.head_dim, layer.index.bits, query_heads // layer.cache.kv_heads, in_words=layer.queries.is_cuda
    )
    steps = launches(layer, scratch, anchors, selection, beliefs, capped, in_order, by_key, launch, cuda)
    for run in steps.values():
        run()


def launches(
    layer: Layer,
    scratch: Scratch,
    anchors: Anchors,
    selection: DeviceSelection,
    beliefs: Tensor,
    capped: Tensor,
    in_order: bool,
    by_key: bool,
    launch: Launch,
    cuda: CudaKernels | None,
) -> dict[str, Callable[[], object]]:
    """Return what ``select`` launches, in order, by name."""
    batch, cache, index, queries, policies = layer.batch, layer.cache, layer.index, layer.queries, layer.policies
    kv_heads = cache.kv_heads
    shape = Shape.of(kv_heads, queries.shape[1] // kv_heads)
    rows, codes, selected = Rows.of(batch), index.arguments(layer.number), Selected.of(selection)
    pairs = batch.rows * kv_heads
    cap = cache.softmax.cap_log2
    assert cuda is None or cap is None
    by_pair = {"window": WINDOW, "pair_block": triton.next_power_of_2(pairs)}
    device = queries.device
    of_batch = (rows, policies, shape, scratch)
    by_unit = (programs_on(device, 4),)

    def sharing(programs: int) -> tuple[int, int, int]:
        of_pair = min(triton.cdiv(batch.longest, shape.unit.value), triton.cdiv(programs, pairs))
        return of_pair, batch.rows, kv_heads

    by_unit_of_pair = sharing(programs_on(device, _ALONE))
    # The interpreter runs programs one after another: none can wait for another.
    at_once = programs_on(device, _MEETING) if queries.is_cuda else 1
    by_unit_meeting = sharing(at_once)
    by_row = {"row_block": max(_MIN_ROW_BLOCK, triton.next_power_of_2(batch.rows))}
    by_head = (1 if by_key else shape.group.value, batch.rows, kv_heads)
    chosen_by = {"window": WINDOW, "by_key": by_key}

    def score(*, again: bool) -> None:
        score_kernel[(programs_on(device, launch.programs),)](
            rows,
            policies,
            codes,
            shape,
            scratch,
            None if cap is None else cap * STEPS,
            pairs,
            **by_pair,
            tile=launch.tile,
            stages=launch.stages,
            in_words=launch.in_words,
            again=again,
            num_warps=launch.warps,
        )

    def total(*, again: bool) -> None:
        grid = (batch.rows, kv_heads)
        total_kernel[grid](*of_batch, anchors, window=WINDOW, by_key=by_key, again=again, num_warps=4)

    in_triton: dict[str, Callable[[], object]] = {
        "prepare": lambda: prepare_kernel[(batch.rows, kv_heads, 2)](
            Vectors.of(queries),
            Vectors.of(cache.keys),
            index.turn,
            rows,
            policies,
            codes,
            shape,
            scratch,
            anchors,
            layer.scale * _LOG2_E,
            cap,
            window=WINDOW,
            dim_block=max(16, triton.next_power_of_2(cache.head_dim)),
            num_warps=4,
        ),
        "score": lambda: score(again=False),
        "total": lambda: total(again=False),
        "score again": lambda: score(again=True),
        "total again": lambda: total(again=True),
        "count": lambda: count_kernel[by_unit_of_pair](*of_batch, anchors, **chosen_by, **by_row, num_warps=1),
        "cut": lambda: cut_kernel[by_head](*of_batch, anchors, **chosen_by, num_warps=1),
        "keep": lambda: keep_kernel[by_unit_meeting](
            *of_batch, anchors, at_once, **chosen_by, **by_row, num_warps=1, maxnreg=_REGISTERS // (32 * _MEETING)
        ),
        "write": lambda: write_kernel[by_unit_of_pair](
            *of_batch,
            selected,
            Counts.of(batch),
            beliefs,
            cache.vector_bytes,
            bytes_of_key(cache.head_dim, index.bits),
            **chosen_by,
            **by_row,
            in_order=in_order,
            num_warps=1,
        ),
    }
    steps = cuda.steps(layer, scratch, anchors, selection, beliefs, in_order=in_order) if cuda else in_triton
    if in_order:
        steps["order counts"] = lambda: order_count_kernel[by_unit](*of_batch, pairs, **by_pair, num_warps=4)
        steps["order scan"] = lambda: order_scan_kernel[(batch.rows, kv_heads, ORDERS // _SCANNED_STEPS)](
            *of_batch, window=WINDOW, steps=_SCANNED_STEPS, num_warps=4
        )
        steps["order"] = lambda: order_kernel[by_unit](*of_batch, selected, pairs, **by_pair, num_warps=4)
        steps["cap"] = lambda: cap_kernel[(batch.rows, kv_heads)](
            *of_batch, selected, beliefs, capped, window=WINDOW, num_warps=4
        )
    return steps
