"""Launching a selection of the low-bit policies on tensors that are never read, to compile it."""

from __future__ import annotations

import torch

from winnow_kernels.batch import DecodeBatch, DeviceSelection, ReportedShares
from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.key_codes import KeyCodes, is_hadamard, rotation
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.policies.lowbit_top_p.gpu.layer import Layer
from winnow_kernels.policies.lowbit_top_p.gpu.selection import Launch, select
from winnow_kernels.policies.lowbit_top_p.gpu.state import Anchors, Policies, Scratch

ROWS, KV_HEADS, SLOTS, LONGEST = 8, 8, 8192, 4096
CPU = torch.device("cpu")


def launch(head_dim: int, group: int, bits: int, page_size: int, by_key: bool) -> None:
    """Launch a selection in order, as on a GPU."""
    keys = torch.empty(SLOTS, KV_HEADS, head_dim, dtype=torch.bfloat16)
    index = KeyCodes([LayerCache(keys, keys)], PageGenerations(SLOTS, page_size, CPU), in_triton=True, bits=bits)
    index.turn = rotation(head_dim).to(keys.dtype if is_hadamard(head_dim) else torch.float32)
    numbers = torch.ones(ROWS, dtype=torch.int32)
    layer = Layer(
        0,
        torch.empty(ROWS, KV_HEADS * group, head_dim, dtype=torch.bfloat16),
        index.caches[0],
        index,
        DecodeBatch.empty(ROWS, LONGEST, page_size, CPU),
        Policies(numbers, torch.ones(ROWS, dtype=torch.float64), *[numbers] * 5),
        0.1,
    )
    select(
        layer,
        Scratch.empty(ROWS, KV_HEADS, group, head_dim, LONGEST, CPU, with_keys=by_key),
        Anchors.empty(ROWS, KV_HEADS * group, KV_HEADS, torch.arange(ROWS)),
        DeviceSelection.empty(ROWS, KV_HEADS, LONGEST, CPU),
        ReportedShares.empty(ROWS, KV_HEADS * group, CPU).beliefs,
        numbers,
        in_order=True,
        by_key=by_key,
        launch=Launch.of(head_dim, bits, group, in_words=True),
    )
