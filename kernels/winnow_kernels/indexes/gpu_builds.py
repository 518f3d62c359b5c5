"""Building the indexes of pages: here the bounds of a page's keys (Quest), elsewhere their codes (``gpu_key_codes``).

A page's keys of all KV heads lie in one block of memory. A program reads such a block, or a part of it, once, and one
launch serves all layers: what it costs is reading the keys, half of the KV cache. A model of the shape of Llama-3.1-8B
has 64 KiB of keys a token: 2.1 GB at 32K tokens, 8.6 GB at 128K, 0.6 and 2.6 ms at an H100's 3.35 TB/s.

At decode a page is complete before its entry is needed: as long as it is the newest page, selectors keep it unscored.
So its entry is built at the start of the step in which the next page begins. That is one launch a step for all layers,
whose programs end at once for rows whose newest token begins no page. After a check of drafts, pages that may have been
built from the drafts' keys are built once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.batch import DecodeBatch
from winnow_kernels.contract.verification import MAX_DRAFT_TOKENS
from winnow_kernels.indexes.gpu_key_pools import KeyPools, Pools, layer_keys
from winnow_kernels.kernel_arguments import Constant, Number, Pointer, Rows

_COLUMNS: Final = 1024
"""Numbers of a slot that a program reads at most: eight heads of 128."""
_ROWS: Final = tl.constexpr(16)
"""Slots that it reads at a time, if a page has as many."""


class Bounds(NamedTuple):
    """``PageBounds.bounds``; a program reads so many ``columns``, numbers of a slot."""

    pointer: Pointer
    layer_stride: Number
    page_size: Constant
    columns: Constant


class Completed(NamedTuple):
    """Which rows are ``active``, and where it is noted what was built of the pages that they have completed.

    ``active`` is int32 [rows]; ``built`` and ``generations`` are those of a ``DevicePageIndex``, and ``anew_from`` is
    the batch's.
    """

    active: Pointer
    built: Pointer
    generations: Pointer
    anew_from: Pointer


@dataclass(frozen=True, eq=False)
class Entries:
    """What an index keeps of each page, in all layers.

    Attributes:
        pools: every layer's keys.
        target: where entries lie.
        write: the kernel function that writes a page's.
        programs: how many a page and layer needs.
    """

    pools: KeyPools
    target: NamedTuple
    write: Callable[..., None]
    programs: int

    @classmethod
    def bounds(cls, pools: KeyPools, bounds: Tensor, page_size: int) -> Entries:
        """Return those of ``bounds``.

        Args:
            pools: every layer's keys.
            bounds: [layers, pages of the pool, KV heads, 2 × head dim], contiguous, of the keys' dtype; a page's
                maxima, then its minima.
            page_size: tokens in a page.
        """
        numbers = pools.kv_heads * pools.head_dim
        columns = min(_COLUMNS, triton.next_power_of_2(numbers))
        target = Bounds(bounds, bounds.stride(0), tl.constexpr(page_size), tl.constexpr(columns))
        return cls(pools, target, _write_bounds, triton.cdiv(numbers, columns))

    def build(self, pages: Tensor) -> None:
        """Write the entries of ``pages``, integers [n]."""
        grid = (len(pages), self.pools.layers, self.programs)
        _build_kernel[grid](self.pools.arguments, pages, self.target, self.write)

    def extend(self, batch: DecodeBatch, active: Tensor, built: Tensor, generations: Tensor) -> None:
        """Write the entries of the pages that ``active`` rows have just completed, or of which keys are written anew.

        Args:
            batch: the step's rows.
            active: int32 [rows]; 0 where nothing shall be done.
            built: int64 [pages of the pool]; gets the generations of the pages.
            generations: int64 [pages of the pool].
        """
        # A check may have written the keys of as many pages.
        most_pages = triton.cdiv(MAX_DRAFT_TOKENS + 1, batch.page_size)
        grid = (batch.rows * most_pages, self.pools.layers, self.programs)
        _extend_kernel[grid](
            self.pools.arguments,
            Rows.of(batch),
            Completed(active, built, generations, batch.anew_from),
            self.target,
            self.write,
            most_pages=most_pages,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _build_kernel(pools: Pools, pages_ptr: tl.tensor, entries: tl.tuple, write: tl.constexpr) -> None:
    """Write entries of given pages; ``write`` says what of, as ``_write_bounds``."""
    write(pools, entries, tl.load(pages_ptr + tl.program_id(0)))


@triton.jit  # type: ignore[untyped-decorator]
def _extend_kernel(
    pools: Pools,
    rows: Rows,
    completed: Completed,
    entries: tl.tuple,
    write: tl.constexpr,
    most_pages: tl.constexpr,
) -> None:
    """Write entries of pages that rows have completed. Grid: rows × ``most_pages``, the last of each; layers; parts."""
    row = tl.program_id(0) // most_pages
    newest = tl.load(rows.lengths + row) - 1
    anew_from = tl.load(completed.anew_from + row)
    acts = tl.load(completed.active + row) != 0
    end = (newest // rows.page_size - tl.program_id(0) % most_pages) * rows.page_size
    if acts & (end > 0) & ((end == newest) | (end > anew_from)):
        page = tl.load(rows.page_table + row.to(tl.int64) * rows.table_stride + end // rows.page_size - 1)
        write(pools, entries, page)
        # The launch's first program of a page says that its entry holds: later launches see all of its programs.
        if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
            tl.store(completed.built + page, tl.load(completed.generations + page))


@triton.jit  # type: ignore[untyped-decorator]
def _write_bounds(pools: Pools, bounds: Bounds, page: tl.tensor) -> None:
    layer = tl.program_id(1)
    column = tl.program_id(2) * bounds.columns + tl.arange(0, bounds.columns)
    inside = column < pools.kv_heads * pools.head_dim
    head, dim = column // pools.head_dim, column % pools.head_dim
    page = page.to(tl.int64)
    keys_ptr = layer_keys(pools.addresses, pools.first, layer) + page * bounds.page_size * pools.slot_stride
    keys_ptr += (head * pools.head_stride + dim)[None, :]
    greatest = tl.full([bounds.columns], float("-inf"), tl.float32)
    least = tl.full([bounds.columns], float("inf"), tl.float32)
    rows: tl.constexpr = min(bounds.page_size, _ROWS)
    for start in range(0, bounds.page_size, rows):
        slots = start + tl.arange(0, rows)
        keys = tl.load(keys_ptr + slots[:, None] * pools.slot_stride, mask=inside[None, :], other=0.0).to(tl.float32)
        greatest = tl.maximum(greatest, tl.max(keys, 0))
        least = tl.minimum(least, tl.min(keys, 0))
    target = layer.to(tl.int64) * bounds.layer_stride + (page * pools.kv_heads + head) * (2 * pools.head_dim) + dim
    tl.store(bounds.pointer + target, greatest.to(pools.first.dtype.element_ty), mask=inside)
    tl.store(bounds.pointer + target + pools.head_dim, least.to(pools.first.dtype.element_ty), mask=inside)
