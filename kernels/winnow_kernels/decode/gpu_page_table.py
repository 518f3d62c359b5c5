"""Copying a step's page table out of the pool's table of slots, before a CUDA graph that reads it is replayed."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import DecodeBatch
from winnow_kernels.kernel_arguments import Rows

_BLOCK: Final = 1024


def copy_page_table(slots: Tensor, request_slots: Tensor, lengths: Tensor, batch: DecodeBatch) -> None:
    """Write the pages and lengths of a step's rows, and reset their counts.

    Args:
        slots: int32 [request slots, positions]; the KV slot of each token of a request. A page's slots are neighbours.
        request_slots: int64 [rows].
        lengths: integers [rows].
        batch: what is written to.
    """
    pages = batch.page_table.shape[1]
    _copy_kernel[(batch.rows, triton.cdiv(pages, _BLOCK))](
        slots, slots.stride(0), request_slots, lengths, Rows.of(batch), batch.counts, batch.counts.shape[1], _BLOCK
    )


@triton.jit  # type: ignore[untyped-decorator]
def _copy_kernel(
    slots_ptr: tl.tensor,
    slots_stride: tl.tensor,
    request_slots_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    rows: Rows,
    counts_ptr: tl.tensor,
    columns: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    if tl.program_id(1) == 0:
        tl.store(rows.lengths + row, length.to(tl.int32))
        column = tl.arange(0, columns)
        tl.store(counts_ptr + row * columns + column, tl.zeros((columns,), tl.int64))
    page = tl.program_id(1) * block + tl.arange(0, block)
    is_page = page * rows.page_size < length
    of_request = tl.load(request_slots_ptr + row) * slots_stride
    slot = tl.load(slots_ptr + of_request + page.to(tl.int64) * rows.page_size, mask=is_page, other=0)
    tl.store(rows.page_table + row * rows.table_stride + page, slot // rows.page_size, mask=is_page)
