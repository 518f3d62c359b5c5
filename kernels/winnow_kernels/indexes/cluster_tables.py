"""Where the clusters of spans are stored, and how torch builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.kmeans import CLUSTER_SIZE, kmeans
from winnow_kernels.indexes.pool_shape import PoolShape
from winnow_kernels.kernel_arguments import Constant, Number, Pointer

_KMEANS_BYTES = 64 * 2**20
"""Bound on the distances that one K-means holds at a time."""


@dataclass(frozen=True, eq=False)
class ClusterTables:
    """All layers' entries, contiguous. Those of a layer are ``LayerClusters``.

    Attributes:
        centroids: [layers, KV heads, entries, clusters, head dim], in the cache's dtype.
        sizes: int16, or int32 if a span is too long for that, [layers, KV heads, entries, clusters].
        firsts: int32, same shape.
        offsets: as ``sizes``, [layers, KV heads, entries, span].
    """

    centroids: Tensor
    sizes: Tensor
    firsts: Tensor
    offsets: Tensor

    @classmethod
    def empty(cls, cache: LayerCache, layers: int, entries: int, span: int) -> ClusterTables:
        """Return space for ``entries`` spans in as many layers, each like ``cache``."""
        clusters = span // CLUSTER_SIZE
        heads_first = (layers, cache.kv_heads, entries)
        sizes = torch.zeros(*heads_first, clusters, dtype=_number_type(span), device=cache.keys.device)
        return cls(
            cache.keys.new_zeros(*heads_first, clusters, cache.head_dim),
            sizes,
            torch.zeros_like(sizes, dtype=torch.int32),
            sizes.new_zeros(*heads_first, span),
        )

    @staticmethod
    def bytes_per_entry(shape: PoolShape, span: int) -> int:
        """Return the bytes of one span's clusters, in all layers."""
        number = _number_type(span).itemsize
        cluster = shape.head_dim * shape.element_size + number + torch.int32.itemsize
        return shape.heads * (span // CLUSTER_SIZE * cluster + span * number)

    def grown(self, more: int) -> ClusterTables:
        """Return the same entries, elsewhere, with space for ``more``."""
        return ClusterTables(
            *(
                torch.cat([t, t.new_zeros(*t.shape[:2], more, *t.shape[3:])], dim=2)
                for t in (self.centroids, self.sizes, self.firsts, self.offsets)
            )
        )

    def layers(self) -> list[LayerClusters]:
        """Return views of each layer's entries."""
        tables = (self.centroids, self.sizes, self.firsts, self.offsets)
        return [LayerClusters(*of_layer) for of_layer in zip(*tables, strict=True)]


@dataclass(frozen=True, eq=False)
class LayerClusters:
    """One layer's entries. KV heads come first, so that a head's centroids of many spans are one matrix.

    All are contiguous; the centroids of a KV head's entry lie in one block.

    Attributes:
        centroids: [KV heads, entries, clusters, head dim], in the cache's dtype.
        sizes: int16, or int32 if a span is too long for that, [KV heads, entries, clusters].
        firsts: int32, same shape; where in a head's ``offsets``, all entries in a row, a cluster's members begin.
        offsets: as ``sizes``, [KV heads, entries, span]; offsets of tokens in the span, cluster by cluster, and in each
            cluster by position; then those of the tokens that were left out.
    """

    centroids: Tensor
    sizes: Tensor
    firsts: Tensor
    offsets: Tensor

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry's centroids and sizes, of all KV heads."""
        kv_heads, _, clusters, head_dim = self.centroids.shape
        return kv_heads * clusters * (head_dim * self.centroids.element_size() + self.sizes.element_size())

    def build(self, cache: LayerCache, entries: Tensor, slots: Tensor, left_out: Tensor) -> None:
        """Cluster the keys at ``slots`` into ``entries``.

        Args:
            cache: the layer's.
            entries: int64 [n].
            slots: int64 [n, span].
            left_out: int64 [n]; how many of a span's first tokens are in no cluster, less than all.
        """
        for tokens in left_out.unique().tolist():
            alike = left_out == tokens
            self._build_alike(cache, entries[alike], slots[alike], tokens)

    def _build_alike(self, cache: LayerCache, entries: Tensor, slots: Tensor, left_out: int) -> None:
        clusters, span = self.sizes.shape[2], self.offsets.shape[2]
        # Of fewer keys than clusters each has one of its own.
        filled = min(clusters, span - left_out)
        at_once = max(1, _KMEANS_BYTES // (4 * cache.kv_heads * span * clusters))
        for some, some_slots in zip(entries.split(at_once), slots.split(at_once), strict=True):
            keys = cache.keys[some_slots[:, left_out:]].transpose(1, 2)
            labels, centroids = kmeans(keys.flatten(0, 1), filled)
            sizes = torch.zeros(labels.shape[0], clusters, dtype=torch.int64, device=labels.device)
            sizes.scatter_add_(1, labels, torch.ones_like(labels))
            heads_first = (len(some), cache.kv_heads)
            centroids = torch.nn.functional.pad(centroids, (0, 0, 0, clusters - filled))
            self.centroids[:, some] = centroids.unflatten(0, heads_first).transpose(0, 1)
            self.sizes[:, some] = sizes.to(self.sizes.dtype).unflatten(0, heads_first).transpose(0, 1)
            firsts = (sizes.cumsum(1) - sizes).int().unflatten(0, heads_first).transpose(0, 1)
            self.firsts[:, some] = firsts + some[:, None].int() * span
            by_cluster = left_out + labels.argsort(dim=1, stable=True)
            not_clustered = torch.arange(left_out, device=labels.device).expand(len(labels), -1)
            offsets = torch.cat([by_cluster, not_clustered], 1).to(self.offsets.dtype)
            self.offsets[:, some] = offsets.unflatten(0, heads_first).transpose(0, 1)

    def read(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Return centroids and sizes of ``entries``, int64 [requests, spans]: those of a request's spans in a row."""
        requests, spans = entries.shape

        def of_spans(table: Tensor) -> Tensor:
            read = table.index_select(1, entries.flatten())
            return read.view(read.shape[0], requests, spans * read.shape[2], *read.shape[3:])

        return of_spans(self.centroids), of_spans(self.sizes)

    def offsets_of(self, places: Tensor, ranks: Tensor) -> Tensor:
        """Return members' offsets in their span, int64.

        Args:
            places: int64 [requests, KV heads, n]; clusters, counted through a head's entries.
            ranks: int64, same shape; which member.
        """
        heads = torch.arange(self.sizes.shape[0], device=places.device)[:, None]
        firsts = self.firsts.flatten().take(places + heads * self.firsts[0].numel())
        addresses = (heads * self.offsets[0].numel() + ranks).add_(firsts)
        return self.offsets.flatten().take(addresses.clamp_max_(self.offsets.numel() - 1)).long()


class Tables(NamedTuple):
    """``ClusterTables`` or ``LayerClusters``, for a kernel: ``capacity`` entries, ``of_span`` clusters in each."""

    centroids: Pointer
    sizes: Pointer
    firsts: Pointer
    offsets: Pointer
    capacity: Number
    span: Constant
    of_span: Constant

    @classmethod
    def of(cls, tables: ClusterTables | LayerClusters) -> Tables:
        """Return those of ``tables``."""
        capacity, of_span = tables.sizes.shape[-2:]
        sizes = (tl.constexpr(tables.offsets.shape[-1]), tl.constexpr(of_span))
        return cls(tables.centroids, tables.sizes, tables.firsts, tables.offsets, capacity, *sizes)


def _number_type(span: int) -> torch.dtype:
    return torch.int16 if span <= torch.iinfo(torch.int16).max else torch.int32
