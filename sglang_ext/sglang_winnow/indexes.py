"""The indexes of a server: each made when the first request needs it, so that dense traffic pays nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.clusters import SPAN, ClusterIndex
from winnow_kernels.indexes.key_norms import KeyNorms
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.indexes.pages import PageGenerations


class Indexes:
    """Side tensors over the KV pool.

    Attributes:
        caches: every layer's KV cache.
        generations: how often each page was begun.
    """

    def __init__(self, caches: Sequence[LayerCache], page_size: int, device: torch.device) -> None:
        self.caches = caches
        self.generations = PageGenerations(caches[0].slots, page_size, device)

    @property
    def page_size(self) -> int:
        return self.generations.page_size

    @cached_property
    def page_bounds(self) -> PageBounds:
        return PageBounds(self.caches, self.generations)

    @cached_property
    def key_norms(self) -> KeyNorms:
        return KeyNorms(self.caches, self.generations)

    @cached_property
    def clusters(self) -> ClusterIndex:
        if not self.generations.counts.is_cuda:
            return ClusterIndex(self.caches, self.generations)
        # CUDA graphs hold the addresses of its tables: they may not grow.
        index = ClusterIndex(self.caches, self.generations, capacity=max(1, self.caches[0].slots // SPAN))
        index.warm_up()
        return index
