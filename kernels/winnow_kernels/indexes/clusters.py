"""Clusters of keys (Tactic, section 3.2) in spans of the context that requests can share.

Spans lie on a grid of absolute positions. An entry holds one span's clusters, for all layers; it belongs to the span's
pages, not to a request. It says which pages it was built from and how often each had been begun by then, and is used
only where all of that still holds: never after one of its pages has been written anew, never by a request whose context
has other pages there.

A request's first tokens, its sinks, are in no cluster. An entry says, too, how many of its span's first tokens it
leaves out. Requests with other sinks have an entry of their own for the span in which these end, and share all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.indexes import gpu_kmeans
from winnow_kernels.indexes.cluster_tables import ClusterTables
from winnow_kernels.indexes.gpu_key_pools import KeyPools
from winnow_kernels.indexes.kmeans import CLUSTER_SIZE, drawn_behind
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.indexes.pool_shape import PoolShape
from winnow_kernels.indexes.settings import DEFAULT, IndexSettings

SPAN = 1024
"""Tokens in a span, unless a server says otherwise."""
MIN_SPAN = 64
RECLUSTER_TOKENS = 2048
"""Decoded tokens are clustered when so many are in no cluster (Tactic, section 1)."""


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
        tokens: int64 [requests]; in the clusters of these spans: all but sinks.
        cluster_places: int64 [requests, most × clusters]; where the clusters are, counted through all entries.
        cluster_starts: int64, same shape; position of the first token of a cluster's span.
    """

    entries: Tensor
    starts: Tensor
    counts: Tensor
    tokens: Tensor
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


@dataclass(frozen=True)
class HeldSpans:
    """What a request can use of its clusters.

    Attributes:
        entries: int32 [spans]; of consecutive spans, first that in which the sinks end: span 0 where they are less
            than a span. What lies behind these spans is in no cluster.
        built_tokens: how many tokens were clustered anew.
    """

    entries: Tensor
    built_tokens: int


class ClusterIndex:
    """Clusters of spans, for all layers, built when first needed.

    An entry is found by its span's last page and how many tokens it leaves out. Of two spans that agree in both, only
    the one that was built later is found.

    Space is found in this order: entries whose tag no longer holds; then

    - without a capacity (how a CPU server runs): new space, so that there are never more entries than live ones or
      than the pool has spans, whichever is larger;
    - with one: entries that no request holds, the one that was not used for the longest time first. If there are too
      few of these, spans stay unclustered, those nearest to the context's end. Nothing moves, so CUDA graphs can read
      the tables: a request's entries are written down once, when it takes ``hold`` of them.

    ``ensure``, ``lookup`` and ``hold`` wait for the GPU; ``release`` does not. All of them, and the kernels that read
    the tables, must run on one stream.

    Attributes:
        caches: every layer's KV cache.
        generations: of the pool's pages.
        span: tokens in a span.
        clusters: clusters of a span and KV head; 16 tokens each on average.
        layers: each layer's entries; with a capacity they are the same tensors for ever.
    """

    name: ClassVar[str] = "clusters"

    def __init__(
        self,
        caches: Sequence[LayerCache],
        generations: PageGenerations,
        span: int = SPAN,
        capacity: int | None = None,
        in_triton: bool | None = None,
    ) -> None:
        """Allocate ``capacity`` entries; ``in_triton`` says who builds, by default Triton where there is CUDA.

        Raises:
            ValueError: ``span`` is too short, no multiple of the page and cluster sizes, or too long for Triton;
                ``capacity`` is less than 1; or the caches are not all of one shape and dtype.
        """
        page_size = generations.page_size
        if span < MIN_SPAN or span % page_size or span % CLUSTER_SIZE:
            raise ValueError(
                f"span: must be at least {MIN_SPAN} and a multiple of {CLUSTER_SIZE} and of the page size, "
                f"{page_size}; it is {span}"
            )
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity: must be at least 1; it is {capacity}")
        self.shape = PoolShape.of(caches)
        self.caches = caches
        self.generations = generations
        self.span = span
        self.clusters = span // CLUSTER_SIZE
        device = generations.counts.device
        can_fit = gpu_kmeans.fits(self.clusters, self.shape.head_dim)
        self.in_triton = device.type == "cuda" and can_fit if in_triton is None else in_triton
        if self.in_triton and not can_fit:
            raise ValueError(f"span: {span} tokens of {self.shape.head_dim} numbers are too many for a Triton program")
        self._grows = capacity is None
        entries = capacity or 0
        self._tag_pages = torch.zeros(entries, span // page_size, dtype=torch.int64, device=device)
        self._tag_generations = torch.full_like(self._tag_pages, -1)
        self._tag_left_out = torch.zeros(entries, dtype=torch.int64, device=device)
        self._last_used = torch.zeros(entries, dtype=torch.int64, device=device)
        self._holders = torch.zeros_like(self._last_used)
        self._held: dict[int, Tensor] = {}
        self._uses = 0
        self._tables = ClusterTables.empty(caches[0], self.shape.layers, entries, span)
        self.layers = self._tables.layers()

    @classmethod
    def for_server(cls, caches: Sequence[LayerCache], generations: PageGenerations, settings: IndexSettings) -> Self:
        """Return the index of a server, on a GPU with an entry for every span of the pool, and warmed up."""
        del settings
        if not generations.counts.is_cuda:
            return cls(caches, generations)
        # CUDA graphs hold the addresses of its tables: they may not grow.
        index = cls(caches, generations, capacity=max(1, caches[0].slots // SPAN))
        index.warm_up()
        return index

    @classmethod
    def bytes_per_slot(
        cls, shape: PoolShape, page_size: int, settings: IndexSettings = DEFAULT, span: int = SPAN
    ) -> float:
        """Return what an index with an entry for every span of the pool adds to a slot."""
        del settings
        tag_numbers = 2 * span // page_size + 3
        return (ClusterTables.bytes_per_entry(shape, span) + tag_numbers * torch.int64.itemsize) / span

    @classmethod
    def unfit(cls, head_dim: int, page_size: int) -> str | None:
        """Return what of a server the index cannot be made for; None if it can."""
        del head_dim
        return f"pages of {page_size} tokens" if SPAN % page_size else None

    @property
    def entries(self) -> int:
        """Entries that there is space for."""
        return self._tag_pages.shape[0]

    def warm_up(self) -> None:
        """Compile what ``ensure`` launches, which takes seconds: before the first request has to wait for it."""
        if self.in_triton:
            self._launch(self._last_used.new_empty(0), self._tag_pages[:0], self._tag_left_out[:0])

    def ensure(self, context: Context, request: int, tokens: int, sinks: int = 0) -> int:
        """Build what is missing or outdated of the clusters of a request's first ``tokens`` tokens, all written.

        Args:
            context: the batch's contexts.
            request: the request's row.
            tokens: a multiple of the span (``clustered_until``).
            sinks: how many of the first tokens are in no cluster.

        Returns:
            How many tokens were clustered anew.

        Raises:
            ValueError: ``tokens`` is no multiple of the span.
        """
        if tokens % self.span:
            raise ValueError(f"tokens: must be a multiple of the span, {self.span}; it is {tokens}")
        return self._ensure(self._span_pages(context, tokens)[request], sinks).built_tokens

    def hold(self, holder: int, pages: Tensor, sinks: int = 0) -> HeldSpans:
        """Build what is missing as ``ensure`` does, and keep the first usable spans' entries for ``holder``.

        The entries stay as they are until the holder releases them or takes hold anew, as after further tokens were
        clustered. The holder must keep its pages for as long.

        Args:
            holder: a number of the caller's choice, the request's.
            pages: int64 [spans × pages in a span]; the request's leading pages, all written.
            sinks: how many of the first tokens are in no cluster.

        Raises:
            ValueError: the pages are not those of whole spans.
        """
        if len(pages) * self.generations.page_size % self.span:
            raise ValueError(f"pages: must fill whole spans of {self.span} tokens; they are {len(pages)}")
        held = self._ensure(pages.view(-1, self.span // self.generations.page_size), sinks)
        entries = held.entries.long()
        self._holders.index_add_(0, entries, torch.ones_like(entries))
        self.release(holder)
        self._held[holder] = entries
        return held

    def release(self, holder: int) -> None:
        """Let go of what ``holder`` holds, if anything: from now on it may be replaced."""
        entries = self._held.pop(holder, None)
        if entries is not None:
            self._holders.index_add_(0, entries, -torch.ones_like(entries))

    def lookup(self, context: Context, tokens: Tensor, sinks: Tensor | None = None) -> Spans:
        """Return the usable spans among each request's first ``tokens``.

        Args:
            context: the batch's contexts.
            tokens: int64 [requests]; multiples of the span.
            sinks: int64 [requests]; how many of the first tokens are in no cluster; none by default.
        """
        longest = int(tokens.max())
        starts = torch.arange(0, longest, self.span, device=context.device)
        left_out = (torch.zeros_like(tokens) if sinks is None else sinks)[:, None].sub(starts).clamp_min(0)
        entries, usable = self._lookup(self._span_pages(context, longest), left_out)
        usable &= (starts < tokens[:, None]) & (left_out < self.span)
        counts = usable.sum(1)
        # Usable spans first, in the order of their positions.
        order = (~usable).long().argsort(dim=1, stable=True)[:, : int(counts.max())]
        inside = torch.arange(order.shape[1], device=context.device) < counts[:, None]
        entries, starts = entries.gather(1, order).where(inside, 0), starts[order].where(inside, 0)
        places = entries[..., None] * self.clusters + torch.arange(self.clusters, device=context.device)
        return Spans(
            entries,
            starts,
            counts,
            (self.span - left_out).where(usable, 0).sum(1),
            places.flatten(1),
            starts.repeat_interleave(self.clusters, dim=1),
        )

    def read(self, layer: int, spans: Spans) -> Clusters:
        """Return the clusters of ``spans``."""
        return Clusters(*self.layers[layer].read(spans.entries))

    def member_bytes(self, layer: int) -> int:
        """Return the bytes read to find one member of a cluster: where the cluster begins, and the member's offset."""
        stored = self.layers[layer]
        return stored.firsts.element_size() + stored.offsets.element_size()

    def read_bytes(self, layer: int) -> int:
        """Return the bytes of one span's centroids and sizes, of all KV heads, in ``layer``."""
        return self.layers[layer].entry_bytes

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
        return starts + self.layers[layer].offsets_of(places, ranks)

    def _span_pages(self, context: Context, tokens: int) -> Tensor:
        """Return the pages of the spans in the first ``tokens`` positions, [requests, spans, pages]; -1 for none."""
        page_size = self.generations.page_size
        first_slots = context.slots[:, :tokens:page_size]
        pages = (first_slots // page_size).masked_fill(first_slots >= self.caches[0].slots, -1)
        return pages.view(context.requests, tokens // self.span, self.span // page_size)

    def _lookup(self, pages: Tensor, left_out: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries of spans and whether they may be used.

        Args:
            pages: [..., pages in a span].
            left_out: [...]; how many of a span's first tokens must be in no cluster.
        """
        if self.entries == 0:
            return torch.zeros_like(left_out), torch.zeros_like(left_out, dtype=torch.bool)
        found = self._with_last_page(pages[..., -1], left_out)
        entries = found.int().argmax(-1)
        matches = (self._tag_pages[entries] == pages) & (
            self._tag_generations[entries] == self.generations.counts[pages]
        )
        return entries, matches.all(-1) & found.any(-1)

    def _with_last_page(self, last_pages: Tensor, left_out: Tensor) -> Tensor:
        """Return which entries have each span's last page and leave out as much, at most one: bool [..., entries]."""
        is_tagged = self._tag_generations[:, -1] >= 0
        alike = (self._tag_pages[:, -1] == last_pages[..., None]) & (self._tag_left_out == left_out[..., None])
        return alike & is_tagged

    def _ensure(self, pages: Tensor, sinks: int) -> HeldSpans:
        """Make as many spans behind the sinks usable as there is space for; ``pages`` is [spans, pages in a span]."""
        pages = pages[sinks // self.span :]
        left_out = torch.zeros(len(pages), dtype=torch.int64, device=pages.device)
        left_out[:1] = sinks % self.span
        entries, usable = self._lookup(pages, left_out)
        missing = (~usable).nonzero()[:, 0]
        usable_spans = len(pages)
        self._uses += 1
        if len(missing):
            found = entries[usable]
            self._last_used[found] = self._uses
            free = self._claim(len(missing), found)
            if len(free) < len(missing):
                usable_spans = int(missing[len(free)])
                missing = missing[: len(free)]
            self._build(free, pages[missing], left_out[missing])
            entries[missing] = free
        self._last_used[entries[:usable_spans]] = self._uses
        built_tokens = len(missing) * self.span - int(left_out[missing].sum())
        return HeldSpans(entries[:usable_spans].int(), built_tokens)

    def _build(self, entries: Tensor, pages: Tensor, left_out: Tensor) -> None:
        """Cluster spans, given as their pages, [n, pages in a span], into ``entries``, [n]."""
        # From here on until the tag is written they belong to no page.
        self._tag_generations[entries] = -1
        if self.in_triton:
            self._launch(entries, pages, left_out)
        else:
            page_size = self.generations.page_size
            slots = (pages[..., None] * page_size + torch.arange(page_size, device=pages.device)).flatten(1)
            for cache, layer in zip(self.caches, self.layers, strict=True):
                layer.build(cache, entries, slots, left_out)
        replaced = self._with_last_page(pages[:, -1], left_out).any(0)
        self._tag_generations[replaced] = -1
        self._tag_pages[entries] = pages
        self._tag_generations[entries] = self.generations.counts[pages]
        self._tag_left_out[entries] = left_out

    def _launch(self, entries: Tensor, pages: Tensor, left_out: Tensor) -> None:
        drawn = self._drawn.expand(len(pages), -1)
        for tokens in left_out[left_out > 0].unique().tolist():
            of_these = drawn_behind(tokens, self.span, self.clusters).int().to(drawn.device)
            drawn = drawn.where((left_out != tokens)[:, None], of_these)
        gpu_kmeans.cluster_spans(self._pools, pages, entries, left_out, drawn.contiguous(), self._tables)

    @cached_property
    def _pools(self) -> KeyPools:
        return KeyPools.of(self.caches)

    @cached_property
    def _drawn(self) -> Tensor:
        return drawn_behind(0, self.span, self.clusters).int().to(self.generations.counts.device)

    def _claim(self, wanted: int, found: Tensor) -> Tensor:
        """Return up to ``wanted`` entries to build in, none of them held or among those ``found`` for this request."""
        live = (self._tag_generations == self.generations.counts[self._tag_pages]).all(1)
        last_used = self._last_used.masked_fill(~live, -1)
        kept = self._holders > 0
        kept[found] = True
        if self._grows:
            kept |= live
        by_use = last_used.masked_fill(kept, torch.iinfo(torch.int64).max).argsort(stable=True)
        free = by_use[: self.entries - int(kept.sum())]
        if self._grows and len(free) < wanted:
            in_pool = -(-self.caches[0].slots // self.span)
            needed = self.entries + wanted - len(free)
            self._grow(max(needed, min(2 * self.entries, in_pool)))
            return self._claim(wanted, found)
        return free[:wanted]

    def _grow(self, entries: int) -> None:
        more = entries - self.entries
        of_tags = (more, self._tag_pages.shape[1])
        self._tag_pages = torch.cat([self._tag_pages, self._tag_pages.new_zeros(of_tags)])
        self._tag_generations = torch.cat([self._tag_generations, self._tag_generations.new_full(of_tags, -1)])
        self._tag_left_out = torch.cat([self._tag_left_out, self._tag_left_out.new_zeros(more)])
        self._last_used = torch.cat([self._last_used, self._last_used.new_zeros(more)])
        self._holders = torch.cat([self._holders, self._holders.new_zeros(more)])
        self._tables = self._tables.grown(more)
        self.layers = self._tables.layers()
