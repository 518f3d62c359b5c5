"""Auditing decode steps on a GPU (``decode.audit``): in every layer, audited rows attend to their whole contexts, too.

The dense pass is that of ``attend.gpu``, over the batch's own page table: rows that are not audited have nothing to
read in it. So a step may audit any rows, and any number of them, and one CUDA graph serves all such steps. Beside what
the step launches anyway, a layer takes three launches: two that attend, and one that compares. What the dense pass
reads is no part of what the request's attention read, and is not counted.

Outputs of the dense pass are float32, rounded less than those of the step, of which an error is to be found. Within, it
rounds as all attention on tensor cores does: weights have the dtype of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.attend.gpu import AttendBuffers, attend
from winnow_kernels.attend.gpu_merge import INFINITY
from winnow_kernels.batch import COUNTS, ELSEWHERE, WHOLE, DecodeBatch, DeviceSelection
from winnow_kernels.cache import LayerCache
from winnow_kernels.decode.audit import AuditedRow
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.host_tensors import to_device
from winnow_kernels.kernel_arguments import Heads, Number, Pointer, Vectors

_NOT_AUDITED: Final = -1.0
_NO_PROMISE: Final = 0.0

_WHOLE = tl.constexpr(WHOLE)
_STEPS = tl.constexpr(int(Field.AUDITED_STEPS))
_HEADS = tl.constexpr(int(Field.AUDITED_HEADS))
_SHARE = tl.constexpr(int(Field.AUDITED_SHARE))
_ERROR = tl.constexpr(int(Field.AUDITED_ERROR))
_REACHED = tl.constexpr(int(Field.AUDITED_REACHED))
_NO_PROMISE_IN_KERNELS = tl.constexpr(_NO_PROMISE)
_SUMS = tl.constexpr(3)


class StepAudit:
    """The audit of steps of up to so many rows.

    Before a step ``audit`` runs on the host, which says which rows are audited. ``begin``, ``compare`` behind the
    attention of each layer and ``count`` are captured.

    Attributes:
        attend_buffers: of the step's own attention: what its rows attended to weighs is left there for ``compare``.
    """

    def __init__(self, rows: int, query_heads: int, cache: LayerCache, attend_buffers: AttendBuffers) -> None:
        """
        Args:
            rows: of the largest step.
            query_heads: of a layer.
            cache: of a layer; all are like it.
            attend_buffers: of all attention, whose scratch is free behind that of the step.
        """
        device = cache.keys.device
        masses = torch.zeros(2, rows, query_heads, dtype=torch.float32, device=device)
        self.attend_buffers = replace(attend_buffers, log_sum_exp=masses[0])
        self._dense_buffers = replace(attend_buffers, log_sum_exp=masses[1])
        # The share that each row's policy promises a query head, float32 as shares are.
        self._promises = torch.full((rows,), _NOT_AUDITED, dtype=torch.float32, device=device)
        self._counts = torch.full((rows, cache.kv_heads), ELSEWHERE, dtype=torch.int32, device=device)
        # What the dense pass reads, which nobody looks at.
        self._read = torch.zeros(rows, COUNTS, dtype=torch.int64, device=device)
        self._dense = torch.zeros(rows, query_heads, cache.head_dim, dtype=torch.float32, device=device)
        # Of a step, added up over layers: shares, errors, and how often p was reached.
        self._sums = torch.zeros(rows, query_heads, _SUMS.value, dtype=torch.float64, device=device)

    @property
    def bytes(self) -> int:
        """Bytes of device memory, beside the scratch of attention."""
        masses = (self.attend_buffers.log_sum_exp, self._dense_buffers.log_sum_exp)
        return sum(t.nbytes for t in (*masses, self._promises, self._counts, self._read, self._dense, self._sums))

    def audit(self, rows: Sequence[AuditedRow], step: Step) -> None:
        """Say which rows of a step are audited, outside of its CUDA graph."""
        if not rows:
            self._promises.fill_(_NOT_AUDITED)
            return
        promises = torch.full((step.rows,), _NOT_AUDITED)
        for audited in rows:
            promises[audited.row] = _NO_PROMISE if audited.p is None else audited.p
        self._promises[: step.rows] = to_device(promises, self._promises.device)

    def begin(self, step: Step) -> None:
        """Do what is done once a step."""
        is_audited = self._promises[: step.rows, None] != _NOT_AUDITED
        self._counts[: step.rows].fill_(ELSEWHERE).masked_fill_(is_audited, WHOLE)
        self._sums[: step.rows].zero_()

    def compare(
        self, layer: int, queries: Tensor, output: Tensor, cache: LayerCache, step: Step, scale: float, *, ordered: bool
    ) -> None:
        """Attend densely with the audited rows, and compare that with what they attended to.

        Args:
            layer: its number.
            queries: [rows, query heads, head dim].
            output: what the step has come to, the same shape.
            cache: the layer's KV cache.
            step: with the selections that were attended to, those of ``attend_buffers``.
            scale: what scores are multiplied by before the softmax.
            ordered: whether rows may have stopped early.
        """
        own, rows = step.batch, step.rows
        batch = DecodeBatch(own.page_size, own.page_table, own.lengths, self._read[:rows], own.anew_from)
        dense = self._dense[:rows]
        everything = DeviceSelection(step.slots, self._counts[:rows])
        attend(queries, cache, batch, everything, scale, None, self._dense_buffers, dense)
        _compare_kernel[(rows, queries.shape[1])](
            Audited(
                self._promises,
                step.counts[layer],
                self.attend_buffers.log_sum_exp,
                self._dense_buffers.log_sum_exp,
                self._sums,
            ),
            Vectors.of(output),
            Vectors.of(dense),
            step.parameters.thresholds if ordered else None,
            Heads.of(queries.shape[1], cache),
            num_warps=1,
        )

    def count(self, step: Step, statistics: Statistics) -> None:
        """Add the step's sums to the statistics of the requests whose rows are audited, after the last layer."""
        layers, query_heads = step.counts.shape[0], self._sums.shape[1]
        table = statistics.rows
        _count_kernel[(step.rows,)](
            Counted(self._promises, self._sums, step.request_slots, table, table.stride(0)),
            layers,
            query_heads=query_heads,
            head_block=triton.next_power_of_2(query_heads),
            num_warps=1,
        )


class Audited(NamedTuple):
    """A layer of a step: what each row's policy promises, the counts of selections, what they and contexts weigh."""

    promises: Pointer
    counts: Pointer
    attended_masses: Pointer
    masses: Pointer
    sums: Pointer


class Counted(NamedTuple):
    """A step: what each row's policy promises, sums of layers, the rows' request slots, and the statistics of these."""

    promises: Pointer
    sums: Pointer
    request_slots: Pointer
    statistics: Pointer
    statistics_stride: Number


@triton.jit  # type: ignore[untyped-decorator]
def _compare_kernel(
    audited: Audited,
    output: Vectors,
    dense: Vectors,
    thresholds_ptr: tl.tensor | None,
    heads: Heads,
) -> None:
    """Grid: rows × query heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    promise = tl.load(audited.promises + row)
    if promise < 0:
        return
    count = tl.load(audited.counts + row * heads.kv_heads + head // heads.group)
    # Who attends elsewhere attends to everything: DELTA at its Δ-layers.
    is_part = count > 0
    if thresholds_ptr is not None:
        is_part |= (count == _WHOLE) & (tl.load(thresholds_ptr + row * 3 + 2) < INFINITY)
    of_head = row * (heads.kv_heads * heads.group) + head
    weight = tl.exp(tl.load(audited.attended_masses + of_head) - tl.load(audited.masses + of_head))
    # Rounding may make a part more than the whole.
    share = tl.where(is_part, tl.minimum(weight, 1.0), 1.0)

    dim = tl.arange(0, heads.dim_block)
    is_dim = dim < heads.head_dim
    output_ptr = output.pointer + row * output.row_stride + head * output.head_stride
    dense_ptr = dense.pointer + row * dense.row_stride + head * dense.head_stride
    exact = tl.load(dense_ptr + dim, mask=is_dim, other=0.0)
    lost = tl.load(output_ptr + dim, mask=is_dim, other=0.0).to(tl.float32) - exact
    error = tl.sqrt(tl.sum(lost * lost, axis=0)) / tl.sqrt(tl.sum(exact * exact, axis=0))
    reached = (promise > _NO_PROMISE_IN_KERNELS) & (share >= promise)

    sums_ptr = audited.sums + of_head * _SUMS
    tl.store(sums_ptr, tl.load(sums_ptr) + share.to(tl.float64))
    tl.store(sums_ptr + 1, tl.load(sums_ptr + 1) + error.to(tl.float64))
    tl.store(sums_ptr + 2, tl.load(sums_ptr + 2) + reached.to(tl.float64))


@triton.jit(do_not_specialize=["layers"])  # type: ignore[untyped-decorator]
def _count_kernel(counted: Counted, layers: tl.tensor, query_heads: tl.constexpr, head_block: tl.constexpr) -> None:
    """Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(counted.promises + row) < 0:
        return
    head = tl.arange(0, head_block)
    sums_ptr = counted.sums + (row * query_heads + head) * _SUMS
    is_head = head < query_heads
    own_ptr = counted.statistics + tl.load(counted.request_slots + row) * counted.statistics_stride
    _add(own_ptr + _STEPS, 1.0)
    _add(own_ptr + _HEADS, layers * query_heads)
    _add(own_ptr + _SHARE, tl.sum(tl.load(sums_ptr, mask=is_head, other=0.0), axis=0))
    _add(own_ptr + _ERROR, tl.sum(tl.load(sums_ptr + 1, mask=is_head, other=0.0), axis=0))
    _add(own_ptr + _REACHED, tl.sum(tl.load(sums_ptr + 2, mask=is_head, other=0.0), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _add(pointer: tl.tensor, amount: tl.tensor) -> None:
    tl.store(pointer, tl.load(pointer) + tl.cast(amount, tl.float64))
