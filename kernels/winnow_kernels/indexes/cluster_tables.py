"""Where the clusters of spans are stored, and how torch builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from winnow_kernels.cache import LayerCache, widened
from winnow_kernels.indexes.kmeans import CLUSTER_SIZE, kmeans, spreads
from winnow_kernels.indexes.pool_shape import PoolShape
from winnow_kernels.kernel_arguments import Constant, Number, Pointer

_KMEANS_BYTES = 64 * 2**20
"""Bound on the distances that one K-means holds at a time."""


@dataclass(frozen=True, eq=False)
class ClusterTables:
    """All layers' entries, contiguous. Those of a layer are ``LayerClusters``.

    Attributes:
        centroids: [layers, KV heads, entries, clusters, head dim], in the cache's dtype, or bfloat16 if that is narrow.
        spreads: bfloat16 [layers, KV heads, entries, clusters].
        directions: bfloat16 [layers, KV heads, entries, head dim].
        sizes: int16, or int32 if a span is too long for that, [layers, KV heads, entries, clusters].
        firsts: int32, same shape.
        offsets: as ``sizes``, [layers, KV heads, entries, span].
    """

    centroids: Tensor
    spreads: Tensor
    directions: Tensor
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
            widened(cache.keys.new_zeros(0)).new_zeros(*heads_first, clusters, cache.head_dim),
            torch.zeros_like(sizes, dtype=torch.bfloat16),
            sizes.new_zeros(*heads_first, cache.head_dim, dtype=torch.bfloat16),
            sizes,
            torch.zeros_like(sizes, dtype=torch.int32),
            sizes.new_zeros(*heads_first, span),
        )

    @staticmethod
    def bytes_per_entry(shape: PoolShape, span: int) -> int:
        """Return the bytes of one span's clusters, in all layers."""
        number = _number_type(span).itemsize
        centroid = shape.head_dim * max(shape.element_size, torch.bfloat16.itemsize)
        cluster = centroid + torch.bfloat16.itemsize + number + torch.int32.itemsize
        directions = shape.head_dim * torch.bfloat16.itemsize
        return shape.heads * (span // CLUSTER_SIZE * cluster + directions + span * number)

    def grown(self, more: int) -> ClusterTables:
        """Return the same entries, elsewhere, with space for ``more``."""
        return ClusterTables(*(torch.cat([t, t.new_zeros(*t.shape[:2], more, *t.shape[3:])], dim=2) for t in self._all))

    def layers(self) -> list[LayerClusters]:
        """Return views of each layer's entries."""
        return [LayerClusters(*of_layer) for of_layer in zip(*self._all, strict=True)]

    @property
    def _all(self) -> tuple[Tensor, ...]:
        return self.centroids, self.spreads, self.directions, self.sizes, self.firsts, self.offsets


@dataclass(frozen=True, eq=False)
class LayerClusters:
    """One layer's entries. KV heads come first, so that a head's centroids of many spans are one matrix.

    All are contiguous; the centroids of a KV head's entry lie in one block.

    Attributes:
        centroids: [KV heads, entries, clusters, head dim], in the cache's dtype, or bfloat16 if that is narrow.
        spreads: bfloat16 [KV heads, entries, clusters]; mean squared distance of a cluster's members from its centroid.
        directions: bfloat16 [KV heads, entries, head dim]; what part each element makes of these distances in the
            clusters of the span, or of its first piece where it is not whole; 1 on average.
        sizes: int16, or int32 if a span is too long for that, [KV heads, entries, clusters].
        firsts: int32, same shape; where in a head's ``offsets``, all entries in a row, a cluster's members begin.
        offsets: as ``sizes``, [KV heads, entries, span]; offsets of tokens in the span, cluster by cluster, and in each
            cluster by position; then those of the tokens that were left out. Of a span that is clustered piece by piece
            each piece is so for itself.
    """

    centroids: Tensor
    spreads: Tensor
    directions: Tensor
    sizes: Tensor
    firsts: Tensor
    offsets: Tensor

    @property
    def cluster_bytes(self) -> int:
        """Bytes of one cluster's centroid, spread and size, of all KV heads."""
        kv_heads, _, _, head_dim = self.centroids.shape
        own = self.spreads.element_size() + self.sizes.element_size()
        return kv_heads * (head_dim * self.centroids.element_size() + own)

    @property
    def span_bytes(self) -> int:
        """Bytes of the directions of one span's clusters, of all KV heads."""
        kv_heads, _, head_dim = self.directions.shape
        return kv_heads * head_dim * self.directions.element_size()

    def build(self, cache: LayerCache, entries: Tensor, slots: Tensor, begins: Tensor, left_out: Tensor) -> None:
        """Cluster the keys at ``slots``, parts of spans, into ``entries``.

        Args:
            cache: the layer's.
            entries: int64 [n].
            slots: int64 [n, tokens of a part].
            begins: int64 [n]; offset of a part's first token in its span.
            left_out: int64 [n]; how many of a part's first tokens are in no cluster.
        """
        for begin, tokens in torch.stack([begins, left_out], 1).unique(dim=0).tolist():
            alike = (begins == begin) & (left_out == tokens)
            self._build_alike(cache, entries[alike], slots[alike], begin, tokens)

    def _build_alike(self, cache: LayerCache, entries: Tensor, slots: Tensor, begin: int, left_out: int) -> None:
        part, span = slots.shape[1], self.offsets.shape[2]
        clusters = part // CLUSTER_SIZE
        # Of fewer keys than clusters each has one of its own.
        filled = min(clusters, part - left_out)
        of_part = slice(begin // CLUSTER_SIZE, begin // CLUSTER_SIZE + clusters)
        at_once = max(1, _KMEANS_BYTES // (4 * cache.kv_heads * part * clusters))
        for some, some_slots in zip(entries.split(at_once), slots.split(at_once), strict=True):
            keys = widened(cache.keys[some_slots[:, left_out:]]).transpose(1, 2).flatten(0, 1)
            sizes = torch.zeros(keys.shape[0], clusters, dtype=torch.int64, device=keys.device)
            directions = torch.ones(keys.shape[0], cache.head_dim, device=keys.device)
            by_cluster = torch.zeros(keys.shape[0], 0, dtype=torch.int64, device=keys.device)
            if filled:
                labels, centroids = kmeans(keys, filled)
                sizes.scatter_add_(1, labels, torch.ones_like(labels))
                by_cluster = left_out + labels.argsort(dim=1, stable=True)
                unfilled = clusters - filled
                _put(self.centroids, F.pad(centroids, (0, 0, 0, unfilled)), some, of_part)
                distances, directions = spreads(keys, labels, centroids)
                _put(self.spreads, F.pad(distances, (0, unfilled)), some, of_part)
            if begin == 0:
                _put(self.directions, directions, some, slice(None))
            _put(self.sizes, sizes, some, of_part)
            firsts = begin + sizes.cumsum(1) - sizes
            firsts += (some * span).repeat_interleave(cache.kv_heads)[:, None]
            _put(self.firsts, firsts, some, of_part)
            not_clustered = torch.arange(left_out, device=keys.device).expand(len(keys), -1)
            offsets = begin + torch.cat([by_cluster, not_clustered], 1)
            _put(self.offsets, offsets, some, slice(begin, begin + part))

    def read(self, entries: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return centroids, spreads, directions and sizes of ``entries``, int64 [requests, spans].

        Those of clusters come for all of a request's spans in a row.
        """
        requests, spans = entries.shape

        def of_spans(table: Tensor) -> Tensor:
            read = table.index_select(1, entries.flatten())
            return read.view(read.shape[0], requests, spans * read.shape[2], *read.shape[3:])

        directions = self.directions.index_select(1, entries.flatten())
        directions = directions.view(len(directions), requests, spans, directions.shape[-1])
        return of_spans(self.centroids), of_spans(self.spreads), directions, of_spans(self.sizes)

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


def _put(table: Tensor, own: Tensor, entries: Tensor, places: slice) -> None:
    """Write ``own``, [entries × KV heads, n, …], at ``places`` of ``entries``."""
    of_entries = own.to(table.dtype).unflatten(0, (len(entries), table.shape[0]))
    table[:, entries, places] = of_entries.transpose(0, 1)


class Tables(NamedTuple):
    """``ClusterTables`` or ``LayerClusters``, for a kernel: ``capacity`` entries, ``of_span`` clusters in each."""

    centroids: Pointer
    spreads: Pointer
    directions: Pointer
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
        span = tl.constexpr(tables.offsets.shape[-1])
        centroids, spreads, directions = tables.centroids, tables.spreads, tables.directions
        of_members = (tables.sizes, tables.firsts, tables.offsets)
        return cls(centroids, spreads, directions, *of_members, capacity, span, tl.constexpr(of_span))


def _number_type(span: int) -> torch.dtype:
    return torch.int16 if span <= torch.iinfo(torch.int16).max else torch.int32
