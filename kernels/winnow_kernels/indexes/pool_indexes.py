"""The indexes of a server: each made when the first request needs it, so that dense traffic pays nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, Self, TypeVar

import torch

from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.indexes.pool_shape import PoolShape
from winnow_kernels.indexes.settings import DEFAULT, IndexSettings


class PoolIndex(Protocol):
    """Side tensors over a KV pool, which requests share.

    Attributes:
        name: what people call it.
    """

    name: ClassVar[str]

    @classmethod
    def for_server(cls, caches: Sequence[LayerCache], generations: PageGenerations, settings: IndexSettings) -> Self:
        """Return the index of a server with these ``caches``; on CUDA its tensors stay where they are."""

    @classmethod
    def bytes_per_slot(cls, shape: PoolShape, page_size: int, settings: IndexSettings = DEFAULT) -> float:
        """Return what the index adds to a slot of the pool."""

    @classmethod
    def unfit(cls, head_dim: int, page_size: int) -> str | None:
        """Return what of a server the index cannot be made for, such as ``pages of 8 tokens``; None if it can."""


Index = TypeVar("Index", bound=PoolIndex)


class Indexes:
    """Side tensors over the KV pool.

    Attributes:
        caches: every layer's KV cache.
        generations: how often each page was begun.
        settings: of the server.
        made: the indexes that were needed, by their classes.
    """

    def __init__(
        self,
        caches: Sequence[LayerCache],
        page_size: int,
        device: torch.device,
        settings: IndexSettings = DEFAULT,
    ) -> None:
        self.caches = caches
        self.settings = settings
        self.generations = PageGenerations(caches[0].slots, page_size, device)
        self.made: dict[type[PoolIndex], PoolIndex] = {}

    @property
    def page_size(self) -> int:
        return self.generations.page_size

    def __getitem__(self, kind: type[Index]) -> Index:
        """Return the index of a class."""
        if kind not in self.made:
            self.made[kind] = kind.for_server(self.caches, self.generations, self.settings)
        index = self.made[kind]
        assert isinstance(index, kind)
        return index
