"""StreamingLLM's selection: sinks, then the window from the newest token back (``reference``).

The selection is the same in all layers and for all KV heads: one launch at the start of a step serves every layer. It
reads the page table and writes 4 bytes for each selected token and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import WHOLE, DecodeBatch, DeviceSelection

_BLOCK: Final = 1024


@dataclass(frozen=True, eq=False)
class StreamingLLMRows:
    """The parameters of a batch's rows.

    Attributes:
        sinks: int32 [rows]; leading tokens that are always attended to.
        window: int32 [rows]; newest tokens that are attended to, at least 1; 0 for a row of another kind.
    """

    sinks: Tensor
    window: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> StreamingLLMRows:
        """Return the parameters of ``rows`` rows of other kinds."""
        sinks, window = torch.zeros(2, rows, dtype=torch.int32, device=device)
        return cls(sinks, window)


def select(batch: DecodeBatch, rows: StreamingLLMRows, selection: DeviceSelection) -> None:
    """Write the slots and counts of the kind's rows: what they attend to in every layer of the step.

    A row whose selection is wider than there is room for attends to its whole context.
    """
    _, kv_heads, width = selection.slots.shape
    assert selection.slots.is_contiguous()
    _select_kernel[(batch.rows, triton.cdiv(width, _BLOCK))](
        rows.sinks,
        rows.window,
        batch.page_table,
        batch.lengths,
        selection.slots,
        selection.counts,
        batch.page_table.stride(0),
        kv_heads,
        width,
        whole=WHOLE,
        page_size=batch.page_size,
        block=_BLOCK,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _select_kernel(
    sinks_ptr: tl.tensor,
    window_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    table_stride: tl.tensor,
    kv_heads: tl.tensor,
    width: tl.tensor,
    whole: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    window = tl.load(window_ptr + row)
    if window == 0:
        return
    length = tl.load(lengths_ptr + row)
    sinks = tl.minimum(tl.load(sinks_ptr + row), length)
    count = sinks + tl.minimum(window, length - sinks)
    if tl.program_id(1) == 0:
        for head in range(kv_heads):
            tl.store(counts_ptr + row * kv_heads + head, tl.where(count <= width, count, whole))
    begin = tl.program_id(1) * block
    if (count > width) | (begin >= count):
        return
    index = begin + tl.arange(0, block)
    position = tl.where(index < sinks, index, length - 1 - (index - sinks))
    selected = index < count
    page = tl.load(page_table_ptr + row * table_stride + position // page_size, mask=selected)
    slot = page * page_size + position % page_size
    for head in range(kv_heads):
        tl.store(slots_ptr + (row * kv_heads + head) * width + index, slot, mask=selected)
