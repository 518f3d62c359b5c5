"""Bounds of a page's keys (Quest, arXiv 2406.10774, section 3.2): the least and the greatest in each channel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.gpu_builds import Entries
from winnow_kernels.indexes.pages import DevicePageIndex, PageGenerations
from winnow_kernels.indexes.pool_shape import PoolShape
from winnow_kernels.indexes.settings import DEFAULT, IndexSettings


class PageBounds(DevicePageIndex):
    """Key bounds of complete pages, in the cache's dtype, in which they are exact.

    Attributes:
        bounds: [layers, pages, KV heads, 2 × head dim]; a page's maxima, then its minima.
    """

    name: ClassVar[str] = "page bounds"

    def __init__(
        self, caches: Sequence[LayerCache], generations: PageGenerations, in_triton: bool | None = None
    ) -> None:
        super().__init__(caches, generations, in_triton)
        shape = self.shape
        self.bounds = caches[0].keys.new_zeros(
            shape.layers, len(generations.counts), shape.kv_heads, 2 * shape.head_dim
        )

    @classmethod
    def bytes_per_slot(cls, shape: PoolShape, page_size: int, settings: IndexSettings = DEFAULT) -> float:
        """Return what the index adds to a slot of the pool: 1 ÷ ``page_size`` of the slot, and its tag's share."""
        del settings
        return (shape.heads * 2 * shape.head_dim * shape.element_size + cls.BYTES_PER_PAGE) / page_size

    def build(self, layer: int, cache: LayerCache, pages: Tensor) -> None:
        keys = self.page_keys(cache, pages)
        self.bounds[layer][pages] = torch.cat((keys.amax(1), keys.amin(1)), dim=-1).to(self.bounds.dtype)

    @cached_property
    def entries(self) -> Entries:
        return Entries.bounds(self.pools, self.bounds, self.generations.page_size)

    def upper_scores(self, layer: int, grouped: Tensor, pages: Tensor, counts: Tensor, meter: Meter) -> Tensor:
        """Return, for each query head and page, the greatest score that a key within the page's bounds can have.

        That is Σ_d max(q_d · min_d, q_d · max_d), before scaling.

        Args:
            layer: the layer's number.
            grouped: float32 [requests, KV heads, group, head dim]; the queries.
            pages: int64 [requests, pages]; beyond the counts any page of the pool.
            counts: int64 [requests]; the pages whose bounds are read.
            meter: counts the bounds that are read.

        Returns:
            float32 [requests, KV heads, group, pages].
        """
        bounds = self.bounds[layer]
        meter.count_bytes(counts * (bounds[0].numel() * bounds.element_size()))
        # A channel's maximum counts where the query is positive, its minimum where it is negative.
        signed = torch.cat((grouped.clamp_min(0), grouped.clamp_max(0)), dim=-1)
        of_pages = bounds.index_select(0, pages.flatten()).view(*pages.shape, *bounds.shape[1:])
        # Bounds times queries, not the other way round: this is faster where those of several heads lie interleaved.
        return (of_pages.float().transpose(1, 2) @ signed.mT).mT
