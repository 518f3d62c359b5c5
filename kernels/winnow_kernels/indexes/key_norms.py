"""Norms of cached keys: what QUOKA divides scores by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.pages import PageGenerations, PageIndex


class KeyNorms(PageIndex):
    """Reciprocal norms of the keys of complete pages.

    Attributes:
        reciprocals: for each layer, float32 [slots, KV heads]; of slots in pages that were not built, 0.
    """

    BYTES = 4
    """Bytes of one key's reciprocal norm."""

    def __init__(self, caches: Sequence[LayerCache], generations: PageGenerations) -> None:
        super().__init__(caches, generations)
        self.reciprocals = [torch.zeros(c.slots, c.kv_heads, device=c.keys.device) for c in caches]

    def build(self, layer: int, cache: LayerCache, pages: Tensor) -> None:
        """Compute the entries of ``pages``, int64 [n], from the layer's keys."""
        size = self.generations.page_size
        slots = pages[:, None] * size + torch.arange(size, device=pages.device)
        self.reciprocals[layer][slots] = reciprocal_norms(self.page_keys(cache, pages))


def reciprocal_norms(vectors: Tensor) -> Tensor:
    """Return 1 ÷ ‖v‖ of ``vectors``, [..., head dim], as float32 [...]; finite for a vector of zeros."""
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32)
    return norms.clamp_min_(torch.finfo(torch.float32).tiny).reciprocal_()
