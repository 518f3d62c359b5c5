"""Copying a step's page table out of the pool's table of slots, before a CUDA graph that reads it is replayed."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import DecodeBatch

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
        slots,
        request_slots,
        lengths,
        batch.page_table,
        batch.lengths,
        batch.counts,
        slots.stride(0),
        batch.page_table.stride(0),
        columns=batch.counts.shape[1],
        page_size=batch.page_size,
        block=_BLOCK,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _copy_kernel(
    slots_ptr: tl.tensor,
    request_slots_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    table_ptr: tl.tensor,
    own_lengths_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    slots_stride: tl.tensor,
    table_stride: tl.tensor,
    columns: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    if tl.program_id(1) == 0:
        tl.store(own_lengths_ptr + row, length.to(tl.int32))
        column = tl.arange(0, columns)
        tl.store(counts_ptr + row * columns + column, tl.zeros((columns,), tl.int64))
    page = tl.program_id(1) * block + tl.arange(0, block)
    is_page = page * page_size < length
    of_request = tl.load(request_slots_ptr + row) * slots_stride
    slot = tl.load(slots_ptr + of_request + page.to(tl.int64) * page_size, mask=is_page, other=0)
    tl.store(table_ptr + row * table_stride + page, slot // page_size, mask=is_page)
