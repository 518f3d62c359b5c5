"""Moving what a request keeps of its prompt into few slots, so that those of all the rest can be given back.

A slot holds a token's keys and values in all layers and KV heads, and each of these keeps other tokens: nearly every
slot of a prompt is kept somewhere. So each KV head of a layer gets its own tokens in the same slots, in the order in
which they are read. Keys are rotated already: where they lie does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from winnow_kernels.cache import LayerCache


def room_for(kept: Mapping[int, Tensor]) -> int:
    """Return how many slots hold what is kept: ``kept`` is that of a ``PromptSelection``."""
    return max(positions.shape[1] for positions in kept.values())


def compact(kept: Mapping[int, Tensor], caches: Sequence[LayerCache], prompt: Tensor, room: Tensor) -> None:
    """Copy what is kept to other slots, which may be among those that it lies in.

    Args:
        kept: by layer, int64 [KV heads, most]; positions in the prompt.
        caches: of each layer.
        prompt: int64 [tokens]; the slot of each token of the prompt.
        room: int64 [``room_for(kept)``]; where they go: the i-th that a KV head keeps in a layer to the i-th slot.
    """
    for layer, positions in kept.items():
        slots = prompt[positions]
        heads = torch.arange(len(slots), device=slots.device)[:, None]
        targets = room[: slots.shape[1]]
        for vectors in (caches[layer].keys, caches[layer].values):
            # Indexing copies, so that no slot is overwritten before it is read.
            vectors[targets, heads] = vectors[slots, heads]
