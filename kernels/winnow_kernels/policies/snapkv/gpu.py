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
from winnow_kernels.selection.gpu_partition import own_share, owner_of, programs_on
from winnow_kernels.selection.gpu_slots import slots_at

_BLOCK: Final = 1024
_TILE = tl.constexpr(TILE)
_WHOLE = tl.constexpr(WHOLE)
# On each multiprocessor.
PROGRAMS: Final = 4


class StoredRows(NamedTuple):
    """What a batch's rows keep of their prompts.

    Attributes:
        positions: int32 [capacity], the pool of all requests; for each KV head the positions in the order in which they
            are read (``SnapKVState.kept``).
        offsets: int64 [rows, layers, KV heads]; where in the pool a KV head's positions in a layer begin.
        kept: int32 [rows, layers, KV heads]; how many positions it keeps, at least 1.
        prompt_lengths: int32 [rows]; tokens in the prompt, less than the context's; 0 for a row of another kind.
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


def select(layer: int, batch: DecodeBatch, rows: StoredRows, selection: DeviceSelection) -> None:
    """Write the slots and counts of the kind's rows in ``layer``.

    A row whose selection is wider than there is room for attends to its whole context.
    """
    kv_heads = selection.slots.shape[1]
    assert rows.kept.is_contiguous()
    assert rows.offsets.is_contiguous()
    pairs = batch.rows * kv_heads
    _select_kernel[(programs_on(selection.slots.device, PROGRAMS),)](
        rows.at(layer),
        Rows.of(batch),
        Selected.of(selection),
        pairs,
        rows.kept.stride(0),
        kv_heads=kv_heads,
        block=_BLOCK,
        pair_block=triton.next_power_of_2(pairs),
    )


@triton.jit(do_not_specialize=["pairs"])  # type: ignore[untyped-decorator]
def _select_kernel(
    parameters: StoredRows,
    rows: Rows,
    selected: Selected,
    pairs: tl.tensor,
    kept_stride: tl.tensor,
    kv_heads: tl.constexpr,
    block: tl.constexpr,
    pair_block: tl.constexpr,
) -> None:
    """Write selections; a pair is a row and a KV head, number row × KV heads + KV head."""
    all_pairs = tl.arange(0, pair_block)
    in_batch = all_pairs < pairs
    all_rows = all_pairs // kv_heads
    prompt_lengths = tl.load(parameters.prompt_lengths + all_rows, mask=in_batch, other=0)
    selects = prompt_lengths > 0
    all_kept = tl.load(parameters.kept + all_rows * kept_stride + all_pairs % kv_heads, mask=selects, other=0)
    counts = tl.load(rows.lengths + all_rows, mask=selects, other=0) - prompt_lengths + all_kept
    if tl.program_id(0) == 0:
        tl.store(selected.counts + all_pairs, tl.where(counts <= selected.width, counts, _WHOLE), mask=selects)
    blocks = tl.where(selects & (counts <= selected.width), tl.cdiv(counts, block), 0)
    begin, end = own_share(blocks)
    for part in range(begin, end):
        pair, first, _after = owner_of(part, blocks)
        row = (pair // kv_heads).to(tl.int64)
        length = tl.load(rows.lengths + row)
        generated = length - tl.load(parameters.prompt_lengths + row)
        own = row * kept_stride + pair % kv_heads
        kept = tl.load(parameters.kept + own)
        index = (part - first) * block + tl.arange(0, block)
        is_selected = index < generated + kept
        front = tl.minimum(generated, _TILE)
        # How many of the tokens before an index are of the prompt.
        before = tl.cdiv(tl.maximum(index - front, 0).to(tl.int64) * kept, generated + kept - front).to(tl.int32)
        through = tl.cdiv(tl.maximum(index + 1 - front, 0).to(tl.int64) * kept, generated + kept - front).to(tl.int32)
        of_prompt = (index >= front) & (through > before) & is_selected
        stored = tl.load(parameters.positions + tl.load(parameters.offsets + own) + before, mask=of_prompt, other=0)
        newest_first = length - 1 - (index - before)
        position = tl.where(of_prompt, stored, newest_first)
        slot = slots_at(rows.page_table + row * rows.table_stride, position, is_selected, rows.page_size)
        tl.store(selected.slots + pair.to(tl.int64) * selected.width + index, slot, mask=is_selected)
