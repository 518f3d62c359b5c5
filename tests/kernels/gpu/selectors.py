"""What the tests of the selectors share: ragged batches on the device, and selections compared with the reference's."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from tests.kernels.gpu.conftest import INTERPRETED
from winnow_kernels.batch import WHOLE, DecodeBatch, DeviceSelection
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.policies.delta.gpu import DeltaRows
from winnow_kernels.selection.tokens import Selection

P = TypeVar("P", bound=NamedTuple)
PAGE_SIZE = 16
UNTOUCHED = -7
HALF: Final = torch.float16 if INTERPRETED else torch.bfloat16
"""A type of two bytes that kernels can multiply matrices of: the interpreter cannot those of bfloat16."""


def on_device(context: Context, device: torch.device, spare_pages: int = 3, page_size: int = PAGE_SIZE) -> DecodeBatch:
    """The batch of ``context``, on ``device``, with room for longer contexts."""
    pages = -(-context.longest // page_size)
    batch = DecodeBatch.empty(context.requests, (pages + spare_pages) * page_size, page_size, device)
    batch.lengths.copy_(context.lengths)
    for row, length in enumerate(context.lengths.tolist()):
        own = context.slots[row, :length:page_size] // page_size
        batch.page_table[row, : len(own)] = own.to(device, torch.int32)
    return batch


def cache_on(device: torch.device, cache: LayerCache) -> LayerCache:
    sink_logits = cache.softmax.sink_logits
    softmax = replace(cache.softmax, sink_logits=None if sink_logits is None else sink_logits.to(device))
    return LayerCache(cache.keys.to(device), cache.values.to(device), softmax=softmax)


def of_other_kinds(parameters: type[P], rows: int, device: torch.device) -> P:
    """The parameters of rows of other kinds: int32 [rows] for each."""
    return parameters(*torch.zeros(len(parameters._fields), rows, dtype=torch.int32, device=device))


def delta_rows(rows: int, layers: int, device: torch.device) -> DeltaRows:
    """The same of DELTA."""
    return of_other_kinds(DeltaRows, rows, device)._replace(
        roles=torch.zeros(layers, rows, dtype=torch.int8, device=device)
    )


def untouched(batch: DecodeBatch, kv_heads: int, width: int) -> DeviceSelection:
    """A selection of which everything that is written shows."""
    selection = DeviceSelection.empty(batch.rows, kv_heads, width, batch.lengths.device)
    selection.slots.fill_(UNTOUCHED)
    selection.counts.fill_(UNTOUCHED)
    return selection


def check_untouched(selection: DeviceSelection, row: int) -> None:
    assert (selection.slots[row] == UNTOUCHED).all()
    assert (selection.counts[row] == UNTOUCHED).all()


def check_whole(selection: DeviceSelection, row: int, count: int = WHOLE) -> None:
    assert (selection.slots[row] == UNTOUCHED).all()
    assert (selection.counts[row] == count).all()


def check_equal(
    selection: DeviceSelection, row: int, expected: Selection, expected_row: int = 0, *, ordered: slice = slice(None)
) -> None:
    """Compare a row with the reference's; the order matters among the tokens of ``ordered`` only."""
    for head in range(selection.counts.shape[1]):
        count = int(expected.counts[expected_row, head])
        assert int(selection.counts[row, head]) == count
        slots = selection.slots[row, head].cpu()
        own, wanted = slots[:count].tolist(), expected.slots[expected_row, head, :count].tolist()
        assert sorted(own) == sorted(wanted)
        assert own[ordered] == wanted[ordered]
        assert (slots[count:] == UNTOUCHED).all()


def integers(shape: tuple[int, ...], limit: int, seed: int) -> Tensor:
    """Small whole numbers, of which scores are exact on every device and often equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-limit, limit + 1, shape, generator=generator).float()
