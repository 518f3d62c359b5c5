"""Adding a decode step's costs to the requests' statistics: one launch a step, whatever its policies."""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import COUNTS, Count
from winnow_kernels.cache import LayerCache
from winnow_kernels.decode.gpu_rows import Parameter, ParameterTable
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.kernel_arguments import Number, Pointer

_STEPS: Final = tl.constexpr(int(Field.STEPS))
_DRAFTED: Final = tl.constexpr(int(Field.DRAFTED))
_DENSE_STEPS: Final = tl.constexpr(int(Field.DENSE_STEPS))
_CONTEXT_TOKENS: Final = tl.constexpr(int(Field.CONTEXT))
_FIRST: Final = tl.constexpr(int(Field.DECODE_CONTEXT))
_KIND: Final = tl.constexpr(int(Parameter.KIND))
_CONTEXT: Final = tl.constexpr(int(Count.CONTEXT))
_ATTENDED: Final = tl.constexpr(int(Count.ATTENDED))
_CONTEXT_BYTES: Final = tl.constexpr(int(Count.CONTEXT_BYTES))
_READ_BYTES: Final = tl.constexpr(int(Count.READ_BYTES))


def count_step(step: Step, table: ParameterTable, statistics: Statistics, everything: LayerCache | None) -> None:
    """Add what a step's rows have read to their requests' statistics.

    Args:
        step: with what was counted.
        table: the parameters that requests have asked for.
        statistics: what is added to.
        everything: a layer's KV cache if all layers attended to everything and counted nothing.
    """
    heads = 0 if everything is None else step.counts.shape[0] * everything.kv_heads
    token_bytes = 0 if everything is None else 2 * everything.vector_bytes
    _count_kernel[(step.rows,)](
        SlotRows.of(statistics.rows),
        SlotRows.of(table.values),
        Counted(step.request_slots, step.batch.lengths, step.batch.counts, step.parameters.kinds, step.drafting),
        heads,
        token_bytes,
        is_dense=everything is not None,
        columns=COUNTS,
        num_warps=1,
    )


class SlotRows(NamedTuple):
    """A table with a row for each request slot."""

    pointer: Pointer
    row_stride: Number

    @classmethod
    def of(cls, table: Tensor) -> SlotRows:
        """Return ``table``, [slots, columns], contiguous in the last dimension."""
        return cls(table, table.stride(0))


class Counted(NamedTuple):
    """A step's rows: their request slots, lengths, ``DecodeBatch.counts`` and kinds, and whether they draft."""

    request_slots: Pointer
    lengths: Pointer
    counts: Pointer
    kinds: Pointer
    drafting: Pointer


@triton.jit  # type: ignore[untyped-decorator]
def _count_kernel(
    statistics: SlotRows,
    table: SlotRows,
    counted: Counted,
    heads: tl.tensor,
    token_bytes: tl.tensor,
    is_dense: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.load(counted.request_slots + row)
    own_ptr = statistics.pointer + slot * statistics.row_stride
    length = tl.load(counted.lengths + row).to(tl.int64)
    column = tl.arange(0, columns)
    if is_dense:
        tokens = length * heads
        is_tokens = (column == _CONTEXT) | (column == _ATTENDED)
        is_bytes = (column == _CONTEXT_BYTES) | (column == _READ_BYTES)
        amounts = tl.where(is_tokens, tokens, tl.where(is_bytes, tokens * token_bytes, 0))
    else:
        amounts = tl.load(counted.counts + row * columns + column)
    # A draft is no step, and its context is the check's to count.
    is_draft = tl.load(counted.drafting + row)
    amounts = tl.where((is_draft != 0) & ((column == _CONTEXT) | (column == _CONTEXT_BYTES)), 0, amounts)
    sums_ptr = own_ptr + _FIRST + column
    tl.store(sums_ptr, tl.load(sums_ptr) + amounts.to(tl.float64))
    tl.store(own_ptr + _STEPS, tl.load(own_ptr + _STEPS) + (1 - is_draft).to(tl.float64))
    tl.store(own_ptr + _DRAFTED, tl.load(own_ptr + _DRAFTED) + is_draft.to(tl.float64))
    tl.store(own_ptr + _CONTEXT_TOKENS, length.to(tl.float64))
    ran_dense = (tl.load(table.pointer + slot * table.row_stride + _KIND) > 0) & (tl.load(counted.kinds + row) == 0)
    tl.store(own_ptr + _DENSE_STEPS, tl.load(own_ptr + _DENSE_STEPS) + ran_dense.to(tl.float64))
