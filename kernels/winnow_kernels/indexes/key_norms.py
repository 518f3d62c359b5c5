"""Norms of cached keys: what QUOKA's prefill divides scores by on a CPU. On a GPU its kernels compute them anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from winnow_kernels.cache import LayerCache, widened
from winnow_kernels.indexes.pages import PageGenerations, PageIndex
from winnow_kernels.indexes.pool_shape import PoolShape
from winnow_kernels.indexes.settings import DEFAULT, IndexSettings


class KeyNorms(PageIndex):
    """Reciprocal norms of the keys of complete pages.

    Attributes:
        reciprocals: float32 [layers, slots, KV heads]; of slots in pages that were not built, 0.
    """

    name: ClassVar[str] = "key norms"

    BYTES = 4
    """Bytes of one key's reciprocal norm."""

    def __init__(self, caches: Sequence[LayerCache], generations: PageGenerations) -> None:
        super().__init__(caches, generations)
        slots = caches[0].slots
        self.reciprocals = torch.zeros(
            self.shape.layers, slots, self.shape.kv_heads, dtype=torch.float32, device=self.built.device
        )

    @classmethod
    def bytes_per_slot(cls, shape: PoolShape, page_size: int, settings: IndexSettings = DEFAULT) -> float:
        """Return what the index adds to a slot of the pool."""
        del settings
        return shape.heads * cls.BYTES + cls.BYTES_PER_PAGE / page_size

    def build(self, layer: int, cache: LayerCache, pages: Tensor) -> None:
        size = self.generations.page_size
        slots = pages[:, None] * size + torch.arange(size, device=pages.device)
        self.reciprocals[layer][slots] = reciprocal_norms(self.page_keys(cache, pages))


def reciprocal_norms(vectors: Tensor) -> Tensor:
    """Return 1 ÷ ‖v‖ of ``vectors``, [..., head dim], as float32 [...]; finite for a vector of zeros."""
    norms: Tensor = torch.linalg.vector_norm(widened(vectors), dim=-1, dtype=torch.float32)
    return norms.clamp_min_(torch.finfo(torch.float32).tiny).reciprocal_()
