"""Moving what a request keeps of its prompt into few slots, so that those of all the rest can be given back.

A slot holds a token's keys and values in all layers and KV heads, and each of these keeps other tokens: nearly every
slot of a prompt is kept somewhere. So each KV head of a layer gets its own tokens in the same slots. Keys are rotated
already: where they lie does not matter.

Tokens lie there in the order of the prompt, those before the first of these slots last: so none is moved to a slot from
which another is still to be moved, and who moves them one after another needs no memory to hold any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from winnow_kernels.cache import LayerCache


def room_for(kept: Mapping[int, Tensor]) -> int:
    """Return how many slots hold what is kept: ``kept`` is that of a ``PromptSelection``."""
    return max(positions.shape[1] for positions in kept.values())


def arranged(positions: Tensor, begin: int, prompt_length: int) -> tuple[Tensor, Tensor]:
    """Return in which order what is kept is moved, and where it lies then.

    Args:
        positions: int64 [..., most]; of tokens of the prompt, no two the same. -1 for none: it comes last.
        begin: the position from which on the tokens lie then.
        prompt_length: tokens.

    Returns:
        Both like ``positions``: the positions in the order in which they are moved, the i-th to ``begin`` + i; and for
        each of ``positions`` the one to which it is moved.
    """
    keys = positions + prompt_length * ((positions < begin).long() + (positions < 0))
    order = keys.argsort(-1)
    return positions.gather(-1, order), begin + order.argsort(-1)


def compact(kept: Mapping[int, Tensor], caches: Sequence[LayerCache], prompt: Tensor, begin: int) -> dict[int, Tensor]:
    """Move what is kept to the slots of the prompt's tokens from position ``begin`` on.

    Args:
        kept: by layer, int64 [KV heads, most]; positions in the prompt.
        caches: of each layer.
        prompt: int64 [tokens]; the slot of each token of the prompt.
        begin: followed by at least ``room_for(kept)`` tokens of the prompt.

    Returns:
        Like ``kept``: the positions at which it lies now.
    """
    places = {}
    for layer, positions in kept.items():
        moved, places[layer] = arranged(positions, begin, len(prompt))
        sources, targets = prompt[moved], prompt[begin : begin + moved.shape[1]]
        heads = torch.arange(len(sources), device=sources.device)[:, None]
        for vectors in (caches[layer].keys, caches[layer].values):
            vectors[targets, heads] = vectors[sources, heads]
    return places
