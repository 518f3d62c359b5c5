"""Side tensors addressed by KV page, and how they know that a page has been written anew."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from winnow_kernels.batch import DecodeBatch
from winnow_kernels.cache import Context, LayerCache, widened
from winnow_kernels.indexes.gpu_builds import Entries
from winnow_kernels.indexes.gpu_key_pools import KeyPools
from winnow_kernels.indexes.pool_shape import PoolShape
from winnow_kernels.indexes.settings import IndexSettings


class PageGenerations:
    """How often each page has been begun. A page is filled from its first slot, so writing that slot begins it.

    Attributes:
        page_size: tokens in a page.
        counts: int64 [pages], on the cache's device.
    """

    BYTES_PER_PAGE = 8

    def __init__(self, slots: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.counts = torch.zeros(-(-slots // page_size), dtype=torch.int64, device=device)

    def written(self, slots: Tensor) -> None:
        """Note that a forward pass writes ``slots``, int64 [tokens]; call before its first layer.

        It waits for nothing on a GPU and can be captured in a CUDA graph.
        """
        self.counts.index_add_(0, slots // self.page_size, (slots % self.page_size == 0).to(self.counts.dtype))

    def rewritten(self, slots: Tensor) -> None:
        """Note that a forward pass writes over ``slots``, int64 [tokens]: their pages count as begun anew."""
        self.counts.index_add_(0, slots // self.page_size, torch.ones_like(slots))

    def complete_pages(self, context: Context, request: int, tokens: int) -> Tensor:
        """Return the pages that ``request``'s first ``tokens`` tokens fill, int64 [tokens // page_size]."""
        first_slots = context.slots[request, : tokens // self.page_size * self.page_size : self.page_size]
        return first_slots // self.page_size


class PageIndex(ABC):
    """Side tensors of complete pages, for all layers: allocated once, built when first needed.

    Attributes:
        caches: every layer's KV cache.
        generations: of the pool's pages.
        built: int64 [pages]; the generation that a page's entry was built from, -1 for none.
    """

    BYTES_PER_PAGE = 8
    """Bytes of ``built``, beside what a page index keeps for each layer and KV head."""

    def __init__(self, caches: Sequence[LayerCache], generations: PageGenerations) -> None:
        """Allocate nothing but ``built``.

        Raises:
            ValueError: the caches are not all of one shape and dtype.
        """
        self.shape = PoolShape.of(caches)
        self.caches = caches
        self.generations = generations
        self.built = torch.full_like(generations.counts, -1)

    @classmethod
    def for_server(cls, caches: Sequence[LayerCache], generations: PageGenerations, settings: IndexSettings) -> Self:
        """Return the index of a server."""
        del settings
        return cls(caches, generations)

    @classmethod
    def unfit(cls, head_dim: int, page_size: int) -> str | None:
        """Return None: it can be made for any heads and pages."""
        del head_dim, page_size
        return None

    def ensure(self, pages: Tensor) -> int:
        """Build what is missing or outdated among ``pages``, int64 [n]: complete in every layer.

        Returns how many pages that were.
        """
        missing = pages[self.built[pages] != self.generations.counts[pages]].unique()
        if len(missing):
            self.build_layers(missing)
            self.built[missing] = self.generations.counts[missing]
        return len(missing)

    def build_layers(self, pages: Tensor) -> None:
        """Compute the entries of ``pages``, int64 [n], in all layers without a window."""
        for layer, cache in enumerate(self.caches):
            if not cache.windowed:
                self.build(layer, cache, pages)

    @abstractmethod
    def build(self, layer: int, cache: LayerCache, pages: Tensor) -> None:
        """Compute the entries of ``pages``, int64 [n], from the layer's keys, in torch."""

    def page_keys(self, cache: LayerCache, pages: Tensor) -> Tensor:
        """Return the keys of ``pages``, ``widened``: [n, page size, KV heads, head dim]."""
        size = self.generations.page_size
        slots = pages[:, None] * size + torch.arange(size, device=pages.device)
        return widened(cache.keys[slots])


class DevicePageIndex(PageIndex):
    """A page index that decode steps on a GPU read, too.

    There all layers are built in one launch. At decode ``extend`` keeps up with the tokens written, inside the step's
    CUDA graph; ``ensure`` waits for the GPU and is for the first step of a request that needs the index.
    """

    def __init__(
        self, caches: Sequence[LayerCache], generations: PageGenerations, in_triton: bool | None = None
    ) -> None:
        """Take what ``PageIndex`` takes; ``in_triton`` says who builds, by default Triton where there is CUDA."""
        super().__init__(caches, generations)
        self.in_triton = self.built.is_cuda if in_triton is None else in_triton

    @cached_property
    def pools(self) -> KeyPools:
        """Every layer's keys, for a kernel."""
        return KeyPools.of(self.caches)

    @cached_property
    @abstractmethod
    def entries(self) -> Entries:
        """What Triton builds, of all layers."""

    def warm_up(self) -> None:
        """Compile what ``ensure`` launches, which takes seconds: before the first request has to wait for it."""
        if self.in_triton:
            self.entries.build(self.built.new_empty(0))

    def build_layers(self, pages: Tensor) -> None:
        if self.in_triton:
            self.entries.build(pages)
        else:
            super().build_layers(pages)

    def extend(self, batch: DecodeBatch, active: Tensor) -> None:
        """Build the entries of the pages that the tokens before the newest ones have completed; one launch.

        Call once a decode step, before its first layer, from a request's first step after ``ensure`` on. It does
        nothing for a row unless its newest token begins a page, or keys were written anew (``DecodeBatch.anew_from``).
        It waits for nothing and can be captured in a CUDA graph, after ``warm_up`` and a first call.

        Args:
            batch: the step's rows.
            active: int32 [rows]; 0 where nothing shall be done.
        """
        self.entries.extend(batch, active, self.built, self.generations.counts)
