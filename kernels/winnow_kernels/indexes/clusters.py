"""Clusters of keys (Tactic, section 3.2) in spans of the context that requests can share.

Spans lie on a grid of absolute positions. An entry holds one span's clusters, for all layers; it belongs to the span's
pages, not to a request. It says which pages it was built from and how often each had been begun by then, and is used
only where all of that still holds: never after one of its pages has been written anew, never by a request whose context
has other pages there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.kmeans import CLUSTER_SIZE, kmeans

SPAN = 1024
"""Tokens in a span, unless a server says otherwise."""
MIN_SPAN = 64
RECLUSTER_TOKENS = 2048
"""Decoded tokens are clustered when so many are in no cluster (Tactic, section 1)."""
_KMEANS_BYTES = 64 * 2**20
"""Bound on the distances that one K-means holds at a time."""


def clustered_until(prompt_length: int, length: int, span: int) -> int:
    """Return how many leading tokens of a request are in clusters, a multiple of ``span``.

    The prompt's whole spans at the first decode step; then, whenever 2,048 or more tokens behind them have been written
    (and there is a whole span of them), all whole spans. It depends on lengths alone, so a request that is replayed
    after a retraction has the same clusters at the same step.

    Args:
        prompt_length: tokens in the prompt.
        length: tokens in the context, with the one that is being decoded: its key is not written yet.
        span: tokens in a span.
    """
    first = prompt_length // span * span
    trigger = max(RECLUSTER_TOKENS, span)
    stride = trigger // span * span
    written_behind = length - 1 - first
    return first + max(0, (written_behind - trigger) // stride + 1) * stride


@dataclass(frozen=True)
class Spans:
    """The spans that a batch's requests can use, and their entries.

    Attributes:
        entries: int64 [requests, most]; beyond a request's number of spans any entry.
        starts: int64 [requests, most]; position of a span's first token; beyond, 0.
        counts: int64 [requests].
        cluster_places: int64 [requests, most × clusters]; where the clusters are, counted through all entries.
        cluster_starts: int64, same shape; position of the first token of a cluster's span.
    """

    entries: Tensor
    starts: Tensor
    counts: Tensor
    cluster_places: Tensor
    cluster_starts: Tensor

    @property
    def most(self) -> int:
        return self.entries.shape[1]


@dataclass(frozen=True)
class Clusters:
    """The clusters of a batch's spans in one layer, for each KV head those of all spans in a row.

    Attributes:
        centroids: [KV heads, requests, clusters, head dim], in the cache's dtype.
        sizes: integers [KV heads, requests, clusters]; of spans beyond a request's, some other span's.
    """

    centroids: Tensor
    sizes: Tensor


class ClusterIndex:
    """Clusters of spans, for all layers, built when first needed.

    Entries whose tag no longer holds are used again before space for new ones is made, so there are never more entries
    than live ones or than the pool has spans, whichever is larger. An entry is found by its span's last page.

    Attributes:
        caches: every layer's KV cache.
        generations: of the pool's pages.
        span: tokens in a span.
        clusters: clusters of a span and KV head; 16 tokens each on average.
    """

    def __init__(self, caches: Sequence[LayerCache], generations: PageGenerations, span: int = SPAN) -> None:
        """Raises ValueError if ``span`` is too short, or no multiple of the page and cluster sizes."""
        page_size = generations.page_size
        if span < MIN_SPAN or span % page_size or span % CLUSTER_SIZE:
            raise ValueError(
                f"span: must be at least {MIN_SPAN} and a multiple of {CLUSTER_SIZE} and of the page size, "
                f"{page_size}; it is {span}"
            )
        self.caches = caches
        self.generations = generations
        self.span = span
        self.clusters = span // CLUSTER_SIZE
        self._by_last_page = torch.full_like(generations.counts, -1)
        device = generations.counts.device
        pages = span // page_size
        self._tag_pages = torch.zeros(0, pages, dtype=torch.int64, device=device)
        self._tag_generations = torch.zeros_like(self._tag_pages)
        self._layers = [_LayerClusters.empty(cache, span) for cache in caches]

    @property
    def entries(self) -> int:
        """Entries that there is space for."""
        return self._tag_pages.shape[0]

    def ensure(self, context: Context, request: int, tokens: int) -> int:
        """Build what is missing or outdated of the clusters of a request's first ``tokens`` tokens, all written.

        Args:
            context: the batch's contexts.
            request: the request's row.
            tokens: a multiple of the span (``clustered_until``).

        Returns:
            How many tokens were clustered anew.

        Raises:
            ValueError: ``tokens`` is no multiple of the span.
        """
        if tokens % self.span:
            raise ValueError(f"tokens: must be a multiple of the span, {self.span}; it is {tokens}")
        pages = self._span_pages(context, tokens)[request]
        entries, usable = self._lookup(pages)
        missing = (~usable).nonzero()[:, 0]
        if len(missing) == 0:
            return 0
        entries = self._free_entries(len(missing))
        pages = pages[missing]
        # From here on until the tag is written they belong to no page.
        self._tag_generations[entries] = -1
        positions = missing[:, None] * self.span + torch.arange(self.span, device=context.device)
        slots = context.slots[request][positions]
        for cache, layer in zip(self.caches, self._layers, strict=True):
            layer.build(cache, entries, slots)
        self._tag_pages[entries] = pages
        self._tag_generations[entries] = self.generations.counts[pages]
        self._by_last_page[pages[:, -1]] = entries
        return len(missing) * self.span

    def lookup(self, context: Context, tokens: Tensor) -> Spans:
        """Return the usable spans among each request's first ``tokens``, int64 [requests], multiples of the span."""
        longest = int(tokens.max())
        entries, usable = self._lookup(self._span_pages(context, longest))
        starts = torch.arange(0, longest, self.span, device=context.device)
        usable &= starts < tokens[:, None]
        counts = usable.sum(1)
        # Usable spans first, in the order of their positions.
        order = (~usable).long().argsort(dim=1, stable=True)[:, : int(counts.max())]
        inside = torch.arange(order.shape[1], device=context.device) < counts[:, None]
        entries, starts = entries.gather(1, order).where(inside, 0), starts[order].where(inside, 0)
        places = entries[..., None] * self.clusters + torch.arange(self.clusters, device=context.device)
        return Spans(entries, starts, counts, places.flatten(1), starts.repeat_interleave(self.clusters, dim=1))

    def read(self, layer: int, spans: Spans) -> Clusters:
        """Return the clusters of ``spans``."""
        return self._layers[layer].read(spans.entries)

    def member_bytes(self, layer: int) -> int:
        """Return the bytes read to find one member of a cluster: where the cluster begins, and the member's offset."""
        stored = self._layers[layer]
        return stored.firsts.element_size() + stored.offsets.element_size()

    def read_bytes(self, layer: int) -> int:
        """Return the bytes of one span's centroids and sizes, of all KV heads, in ``layer``."""
        return self._layers[layer].entry_bytes

    def members(self, layer: int, spans: Spans, clusters: Tensor, ranks: Tensor) -> Tensor:
        """Return the positions of clusters' members.

        Args:
            layer: the layer.
            spans: the batch's spans.
            clusters: int64 [requests, KV heads, n]; numbers of clusters, counted through a request's spans.
            ranks: int64, same shape; which member of the cluster, from 0. Beyond its size, any position in the context.
        """
        flat = clusters.flatten(1)
        places = spans.cluster_places.gather(1, flat).view_as(clusters)
        starts = spans.cluster_starts.gather(1, flat).view_as(clusters)
        return starts + self._layers[layer].offsets_of(places, ranks)

    def _span_pages(self, context: Context, tokens: int) -> Tensor:
        """Return the pages of the spans in the first ``tokens`` positions, [requests, spans, pages]; -1 for none."""
        page_size = self.generations.page_size
        first_slots = context.slots[:, :tokens:page_size]
        pages = (first_slots // page_size).masked_fill(first_slots >= self.caches[0].slots, -1)
        return pages.view(context.requests, tokens // self.span, self.span // page_size)

    def _lookup(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries of spans, given as their pages, [..., pages], and whether they may be used."""
        if self.entries == 0:
            return torch.zeros_like(pages[..., 0]), torch.zeros_like(pages[..., 0], dtype=torch.bool)
        found = self._by_last_page[pages[..., -1]]
        entries = found.clamp_min(0)
        matches = (self._tag_pages[entries] == pages) & (
            self._tag_generations[entries] == self.generations.counts[pages]
        )
        return entries, matches.all(-1) & (found >= 0)

    def _free_entries(self, wanted: int) -> Tensor:
        """Return ``wanted`` entries that are not live, making space for more if there are too few."""
        live = (self._tag_generations == self.generations.counts[self._tag_pages]).all(1)
        # Two spans with the same last page: only the one built later can be found.
        live &= self._by_last_page[self._tag_pages[:, -1]] == torch.arange(self.entries, device=live.device)
        free = (~live).nonzero()[:, 0]
        if len(free) < wanted:
            in_pool = -(-self.caches[0].slots // self.span)
            needed = self.entries + wanted - len(free)
            self._grow(max(needed, min(2 * self.entries, in_pool)))
            return self._free_entries(wanted)
        return free[:wanted]

    def _grow(self, entries: int) -> None:
        more = entries - self.entries
        self._tag_pages = torch.cat([self._tag_pages, self._tag_pages.new_zeros(more, self._tag_pages.shape[1])])
        self._tag_generations = torch.cat(
            [self._tag_generations, self._tag_generations.new_full((more, self._tag_pages.shape[1]), -1)]
        )
        self._layers = [layer.grown(more) for layer in self._layers]


@dataclass
class _LayerClusters:
    """One layer's entries. KV heads come first, so that a head's centroids of many spans are one matrix.

    Attributes:
        centroids: [KV heads, entries, clusters, head dim], in the cache's dtype.
        sizes: int16, or int32 if a span is too long for that, [KV heads, entries, clusters].
        firsts: int32, same shape; where in a head's ``offsets``, all entries in a row, a cluster's members begin.
        offsets: as ``sizes``, [KV heads, entries, span]; offsets of tokens in the span, cluster by cluster.
    """

    centroids: Tensor
    sizes: Tensor
    firsts: Tensor
    offsets: Tensor

    @classmethod
    def empty(cls, cache: LayerCache, span: int) -> _LayerClusters:
        clusters = span // CLUSTER_SIZE
        dtype = torch.int16 if span <= torch.iinfo(torch.int16).max else torch.int32
        numbers = torch.zeros(cache.kv_heads, 0, clusters, dtype=dtype, device=cache.keys.device)
        return cls(
            cache.keys.new_zeros(cache.kv_heads, 0, clusters, cache.head_dim),
            numbers,
            numbers.int(),
            numbers.new_zeros(cache.kv_heads, 0, span),
        )

    @property
    def entry_bytes(self) -> int:
        kv_heads, _, clusters, head_dim = self.centroids.shape
        return kv_heads * clusters * (head_dim * self.centroids.element_size() + self.sizes.element_size())

    def grown(self, more: int) -> _LayerClusters:
        return _LayerClusters(
            *(
                torch.cat([t, t.new_zeros(t.shape[0], more, *t.shape[2:])], dim=1)
                for t in (self.centroids, self.sizes, self.firsts, self.offsets)
            )
        )

    def build(self, cache: LayerCache, entries: Tensor, slots: Tensor) -> None:
        """Cluster the keys at ``slots``, [n, span], into ``entries``, [n]."""
        clusters, span = self.sizes.shape[2], self.offsets.shape[2]
        at_once = max(1, _KMEANS_BYTES // (4 * cache.kv_heads * span * clusters))
        for some, some_slots in zip(entries.split(at_once), slots.split(at_once), strict=True):
            keys = cache.keys[some_slots].transpose(1, 2)
            labels, centroids = kmeans(keys.flatten(0, 1), clusters)
            sizes = torch.zeros(labels.shape[0], clusters, dtype=torch.int64, device=labels.device)
            sizes.scatter_add_(1, labels, torch.ones_like(labels))
            heads_first = (len(some), cache.kv_heads)
            self.centroids[:, some] = centroids.to(cache.keys.dtype).unflatten(0, heads_first).transpose(0, 1)
            self.sizes[:, some] = sizes.to(self.sizes.dtype).unflatten(0, heads_first).transpose(0, 1)
            firsts = (sizes.cumsum(1) - sizes).int().unflatten(0, heads_first).transpose(0, 1)
            self.firsts[:, some] = firsts + some[:, None].int() * span
            by_cluster = labels.argsort(dim=1, stable=True).to(self.offsets.dtype)
            self.offsets[:, some] = by_cluster.unflatten(0, heads_first).transpose(0, 1)

    def read(self, entries: Tensor) -> Clusters:
        requests, spans = entries.shape

        def of_spans(table: Tensor) -> Tensor:
            read = table.index_select(1, entries.flatten())
            return read.view(read.shape[0], requests, spans * read.shape[2], *read.shape[3:])

        return Clusters(of_spans(self.centroids), of_spans(self.sizes))

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
