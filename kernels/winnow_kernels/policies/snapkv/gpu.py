"""SnapKV's and PyramidKV's selections: what a request keeps of its prompt, and all that was generated since.

What is kept differs between layers and KV heads and is known from the prompt's end on: a launch in each layer turns
positions into slots, in the order of ``reference.SnapKVStep``. It reads the kept positions and the page
table and writes 4 bytes for each selected token.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.attend.early_termination import TILE
from winnow_kernels.batch import WHOLE, DecodeBatch, DeviceSelection
from winnow_kernels.kernel_arguments import Rows, Selected
from winnow_kernels.selection.gpu_partition import programs_on
from winnow_kernels.selection.gpu_slots import slots_at

_BLOCK: Final = 256
_TILE = tl.constexpr(TILE)
_LARGEST = tl.constexpr(2**31)
_WHOLE = tl.constexpr(WHOLE)
# On each multiprocessor.
PROGRAMS: Final = 4


class StoredRows(NamedTuple):
    """What a batch's rows keep of their prompts.

    Attributes:
        positions: int32 [capacity], the pool of all requests; for each KV head the positions in the order in which they
            are read (``SnapKVState.kept``), or the pages.
        offsets: int64 [rows, layers, KV heads]; where in the pool a KV head's positions in a layer begin.
        kept: int32 [rows, layers, KV heads]; how many positions, or pages, it keeps.
        prompt_lengths: int32 [rows]; tokens in the prompt, less than the context's, or those before which pages are
            kept; 0 for a row of another kind.
    """

    positions: Tensor
    offsets: Tensor
    kept: Tensor
    prompt_lengths: Tensor

    @classmethod
    def empty(cls, rows: int, layers: int, kv_heads: int, capacity: int, device: torch.device) -> StoredRows:
        """Return the parameters of ``rows`` rows of other kinds, with a pool of ``capacity`` positions."""
        return cls(
            torch.zeros(capacity, dtype=torch.int32, device=device),
            torch.zeros(rows, layers, kv_heads, dtype=torch.int64, device=device),
            torch.zeros(rows, layers, kv_heads, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )

    def at(self, layer: int) -> StoredRows:
        """Return those in one layer: offsets and kept [rows, KV heads]."""
        return self._replace(offsets=self.offsets[:, layer], kept=self.kept[:, layer])


def select(layer: int, batch: DecodeBatch, rows: StoredRows, selection: DeviceSelection, unit: int = 1) -> None:
    """Write the slots and counts of the kind's rows in ``layer``, which keep positions, or pages of ``unit`` tokens.

    A row whose selection is wider than there is room for attends to its whole context.
    """
    _, kv_heads, width = selection.slots.shape
    assert rows.kept.is_contiguous()
    assert rows.offsets.is_contiguous()
    pairs = batch.rows * kv_heads
    programs = programs_on(selection.slots.device, PROGRAMS)
    of_pair = min(triton.cdiv(width, _BLOCK), max(1, programs // pairs))
    _select_kernel[(pairs, of_pair)](
        rows.at(layer),
        Rows.of(batch),
        Selected.of(selection),
        rows.kept.stride(0),
        unit=unit,
        kv_heads=kv_heads,
        block=_BLOCK,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _select_kernel(
    parameters: StoredRows,
    rows: Rows,
    selected: Selected,
    kept_stride: tl.tensor,
    unit: tl.constexpr,
    kv_heads: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write selections. Grid: pairs, a row and a KV head each, × programs of a pair."""
    pair, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = (pair // kv_heads).to(tl.int64)
    own = row * kept_stride + pair % kv_heads
    # All loaded before any is needed: what waits for another load is the positions, and then the page table.
    prompt_length = tl.load(parameters.prompt_lengths + row)
    length = tl.load(rows.lengths + row)
    kept = tl.load(parameters.kept + own) * unit
    stored_ptr = parameters.positions + tl.load(parameters.offsets + own)
    if prompt_length == 0:
        return
    generated = length - prompt_length
    count = generated + kept
    if part == 0:
        tl.store(selected.counts + pair, tl.where(count <= selected.width, count, _WHOLE))
    if count > selected.width:
        return
    front = tl.minimum(generated, _TILE)
    others = tl.maximum(count - front, 1)
    is_long = (count.to(tl.int64) + block) * (kept + 1) + count >= _LARGEST
    for begin in range(part * block, count, parts * block):
        index = begin + tl.arange(0, block)
        is_selected = index < count
        # How many of the tokens before an index are of the prompt. Divisions of 64 bits take several times as long.
        behind = tl.maximum(index - front, 0)
        through_behind = tl.maximum(index + 1 - front, 0)
        if is_long:
            before = tl.cdiv(behind.to(tl.int64) * kept, others).to(tl.int32)
            through = tl.cdiv(through_behind.to(tl.int64) * kept, others).to(tl.int32)
        else:
            before = tl.cdiv(behind * kept, others)
            through = tl.cdiv(through_behind * kept, others)
        of_prompt = (index >= front) & (through > before) & is_selected
        stored = tl.load(stored_ptr + before // unit, mask=of_prompt, other=0) * unit + before % unit
        newest_first = length - 1 - (index - before)
        position = tl.where(of_prompt, stored, newest_first)
        slot = slots_at(rows.page_table + row * rows.table_stride, position, is_selected, rows.page_size)
        tl.store(selected.slots + pair.to(tl.int64) * selected.width + index, slot, mask=is_selected)
