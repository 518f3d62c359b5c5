"""Side tensors addressed by KV page, and how they know that a page has been written anew."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from winnow_kernels.cache import Context, LayerCache


class PageGenerations:
    """How often each page has been begun. A page is filled from its first slot, so writing that slot begins it.

    Attributes:
        page_size: tokens in a page.
        counts: int64 [pages], on the cache's device.
    """

    def __init__(self, slots: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.counts = torch.zeros(-(-slots // page_size), dtype=torch.int64, device=device)

    def written(self, slots: Tensor) -> None:
        """Note that a forward pass writes ``slots``, int64 [tokens]; call before its first layer."""
        begun = slots[slots % self.page_size == 0] // self.page_size
        self.counts.index_add_(0, begun, torch.ones_like(begun))

    def complete_pages(self, context: Context, request: int, tokens: int) -> Tensor:
        """Return the pages that ``request``'s first ``tokens`` tokens fill, int64 [tokens // page_size]."""
        first_slots = context.slots[request, : tokens // self.page_size * self.page_size : self.page_size]
        return first_slots // self.page_size


class PageIndex(ABC):
    """Side tensors of complete pages, for all layers, built when first needed.

    Attributes:
        caches: every layer's KV cache.
        generations: of the pool's pages.
        built: int64 [pages]; the generation that a page's entry was built from, -1 for none.
    """

    def __init__(self, caches: Sequence[LayerCache], generations: PageGenerations) -> None:
        self.caches = caches
        self.generations = generations
        self.built = torch.full_like(generations.counts, -1)

    def ensure(self, pages: Tensor) -> int:
        """Build what is missing or outdated among ``pages``, int64 [n]: complete in every layer.

        Returns how many pages that were.
        """
        missing = pages[self.built[pages] != self.generations.counts[pages]].unique()
        if len(missing):
            for layer, cache in enumerate(self.caches):
                self.build(layer, cache, missing)
            self.built[missing] = self.generations.counts[missing]
        return len(missing)

    @abstractmethod
    def build(self, layer: int, cache: LayerCache, pages: Tensor) -> None:
        """Compute the entries of ``pages``, int64 [n], from the layer's keys."""

    def page_keys(self, cache: LayerCache, pages: Tensor) -> Tensor:
        """Return the keys of ``pages``: [n, page size, KV heads, head dim]."""
        size = self.generations.page_size
        slots = pages[:, None] * size + torch.arange(size, device=pages.device)
        return cache.keys[slots]
