"""KV slots that a pass beside those of requests writes, and gives back as they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from winnow_kernels.cache import LayerCache


@contextmanager
def borrowed(slots: Tensor, caches: Iterable[LayerCache]) -> Iterator[None]:
    """Put back what ``slots`` hold now, at the end.

    Args:
        slots: int64 [tokens].
        caches: the KV cache of every layer that is written.
    """
    # By bytes: torch writes no numbers of narrow dtypes to places of its choice.
    pools = [pool.view(torch.uint8) for cache in caches for pool in (cache.keys, cache.values)]
    before = [pool[slots] for pool in pools]
    try:
        yield
    finally:
        for pool, kept in zip(pools, before, strict=True):
            pool[slots] = kept
