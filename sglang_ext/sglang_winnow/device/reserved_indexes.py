"""What indexes a server on a GPU has room for from its start, and how much each takes beside the KV cache."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from winnow_kernels.indexes.pool_indexes import PoolIndex
from winnow_kernels.indexes.pool_shape import PoolShape
from winnow_kernels.indexes.settings import DEFAULT, IndexSettings
from winnow_kernels.policies.declarations import DECLARATIONS


@dataclass(frozen=True)
class ReservedIndex:
    """One of them.

    Attributes:
        name: what people call it.
        policies: the served decode policies that read it.
        share: bytes that it adds to the KV cache, of those of the KV cache.
    """

    name: str
    policies: tuple[str, ...]
    share: float


def reserved_indexes(
    policies: Collection[str],
    shape: PoolShape,
    page_size: int,
    settings: IndexSettings = DEFAULT,
    windowed_layers: int = 0,
) -> list[ReservedIndex]:
    """Return the indexes of the decode policies that are served, in the order of these.

    Args:
        policies: the served decode policies.
        shape: of the KV cache in the layers that are indexed.
        page_size: slots in a page.
        settings: of the server.
        windowed_layers: how many the KV cache has beside these, as large each.
    """
    slot_bytes = shape.slot_bytes * (shape.layers + windowed_layers) / shape.layers
    readers: dict[type[PoolIndex], list[str]] = {}
    for name in policies:
        if (index := DECLARATIONS[name].index) is not None:
            readers.setdefault(index, []).append(name)
    return [
        ReservedIndex(index.name, tuple(names), index.bytes_per_slot(shape, page_size, settings) / slot_bytes)
        for index, names in readers.items()
    ]
