"""How large a KV pool's slots are, and so how much an index adds to each: for whoever divides memory among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from winnow_kernels.cache import LayerCache


@dataclass(frozen=True)
class PoolShape:
    """What one slot of a KV pool holds, in all layers.

    Attributes:
        layers: how many the model has.
        kv_heads: of each layer, on this GPU.
        head_dim: of a key and of a value.
        element_size: bytes of a number of the cache's dtype.
    """

    layers: int
    kv_heads: int
    head_dim: int
    element_size: int

    @classmethod
    def of(cls, caches: Sequence[LayerCache]) -> PoolShape:
        """Return the shape of ``caches``, one for each layer.

        Raises:
            ValueError: they are not all of one shape and dtype.
        """
        first = caches[0].keys
        if any(cache.keys.shape != first.shape or cache.keys.dtype != first.dtype for cache in caches):
            raise ValueError("caches: an index needs layers of one shape and dtype")
        return cls(len(caches), caches[0].kv_heads, caches[0].head_dim, first.element_size())

    @property
    def heads(self) -> int:
        """KV heads of all layers."""
        return self.layers * self.kv_heads

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's keys and values."""
        return self.heads * 2 * self.head_dim * self.element_size
