"""StreamingLLM's selection: sinks, then the window from the newest token back (``reference``).

The selection is the same in all layers and for all KV heads: one launch at the start of a step serves every layer. It
reads the page table and writes 4 bytes for each selected token and KV head.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import WHOLE, DecodeBatch, DeviceSelection
from winnow_kernels.kernel_arguments import Rows, Selected
from winnow_kernels.selection.gpu_slots import slots_at

_BLOCK: Final = 1024
_WHOLE = tl.constexpr(WHOLE)


class StreamingLLMRows(NamedTuple):
    """The parameters of a batch's rows.

    Attributes:
        sinks: int32 [rows]; leading tokens that are always attended to.
        window: int32 [rows]; newest tokens that are attended to, at least 1; 0 for a row of another kind.
    """

    sinks: Tensor
    window: Tensor


def select(batch: DecodeBatch, rows: StreamingLLMRows, selection: DeviceSelection) -> None:
    """Write the slots and counts of the kind's rows: what they attend to in every layer of the step.

    A row whose selection is wider than there is room for attends to its whole context.
    """
    _, kv_heads, width = selection.slots.shape
    _select_kernel[(batch.rows, triton.cdiv(width, _BLOCK))](
        rows, Rows.of(batch), Selected.of(selection), kv_heads, block=_BLOCK
    )


@triton.jit  # type: ignore[untyped-decorator]
def _select_kernel(
    parameters: StreamingLLMRows, rows: Rows, selected: Selected, kv_heads: tl.tensor, block: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    window = tl.load(parameters.window + row)
    if window == 0:
        return
    length = tl.load(rows.lengths + row)
    sinks = tl.minimum(tl.load(parameters.sinks + row), length)
    count = sinks + tl.minimum(window, length - sinks)
    if tl.program_id(1) == 0:
        for head in range(kv_heads):
            tl.store(selected.counts + row * kv_heads + head, tl.where(count <= selected.width, count, _WHOLE))
    begin = tl.program_id(1) * block
    if (count > selected.width) | (begin >= count):
        return
    index = begin + tl.arange(0, block)
    position = tl.where(index < sinks, index, length - 1 - (index - sinks))
    is_selected = index < count
    slot = slots_at(rows.page_table + row * rows.table_stride, position, is_selected, rows.page_size)
    for head in range(kv_heads):
        tl.store(selected.slots + (row * kv_heads + head) * selected.width + index, slot, mask=is_selected)
