"""Launching a selection of QUOKA on tensors that are never read, to compile it."""

from __future__ import annotations

import torch

from winnow_kernels.batch import DecodeBatch, DeviceSelection
from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.key_codes import KeyCodes, is_hadamard, rotation
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.policies.quoka import gpu as quoka
from winnow_kernels.selection.gpu_top import TopRows

ROWS, KV_HEADS, SLOTS, LONGEST, WIDTH = 8, 8, 8192, 4096, 512
CPU = torch.device("cpu")


def launch(head_dim: int, group: int, bits: int, page_size: int) -> None:
    """Launch a selection in order, as on a GPU."""
    keys = torch.empty(SLOTS, KV_HEADS, head_dim, dtype=torch.bfloat16)
    index = KeyCodes([LayerCache(keys, keys)], PageGenerations(SLOTS, page_size, CPU), in_triton=True, bits=bits)
    index.turn = rotation(head_dim).to(keys.dtype if is_hadamard(head_dim) else torch.float32)
    quoka.select(
        0,
        torch.empty(ROWS, KV_HEADS * group, head_dim, dtype=torch.bfloat16),
        index.caches[0],
        index,
        DecodeBatch.empty(ROWS, LONGEST, page_size, CPU),
        TopRows(*torch.ones(3, ROWS, dtype=torch.int32)),
        DeviceSelection.empty(ROWS, KV_HEADS, WIDTH, CPU),
        quoka.Scratch.empty(ROWS, KV_HEADS, head_dim, LONGEST, WIDTH, CPU),
        any_by_score=True,
        launch=quoka.launch_of(head_dim, bits, in_words=True),
    )
