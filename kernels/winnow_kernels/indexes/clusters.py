"""Clusters of keys (Tactic, section 3.2) in spans of the context that requests can share.

Spans lie on a grid of absolute positions. An entry holds one span's clusters, for all layers; it belongs to the span's
pages, not to a request. It says which pages it was built from and how often each had been begun by then, and is used
only where all of that still holds: never after one of its pages has been written anew, never by a request whose context
has other pages there.

The last span of a context need not be whole. As far as it is there in whole pieces, quarters of a span, each piece is
clustered by itself, and these are one entry, too, of fewer pages. Where the context has grown, a new entry holds more
pieces, or the span, clustered as a whole: larger sets of keys cluster better. Entries never change, so requests that
stand at different points of one context do not disturb each other.

A request's first tokens, its sinks, are in no cluster. An entry says, too, how many of its span's first tokens it
leaves out. Requests with other sinks have an entry of their own for the span in which these end, and share all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
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
SPANS_OF_PARTIAL = 6
"""A server on a GPU has room for one entry of a span that is not whole for as many spans of its pool."""
PIECES = 4
"""Pieces of a span, which are clustered each by itself until all are there."""
RECLUSTER_TOKENS = 512
"""Decoded tokens are clustered when so many are in no cluster (2,048 in Tactic, section 1)."""


def piece_of(span: int, page_size: int) -> int:
    """Return the tokens of a piece: of a whole span, where pieces would not be whole pages and clusters."""
    piece = span // PIECES
    return piece if piece % page_size == 0 and piece % CLUSTER_SIZE == 0 else span


def clustered_until(prompt_length: int, length: int, piece: int) -> int:
    """Return how many leading tokens of a request are in clusters, a multiple of ``piece``.

    The prompt's whole pieces at the first decode step; then, whenever 512 or more tokens behind them have been written
    (and there is a whole piece of them), all whole pieces. It depends on lengths alone, so a request that is replayed
    after a retraction has the same clusters at the same step.

    Args:
        prompt_length: tokens in the prompt.
        length: tokens in the context, with the one that is being decoded: its key is not written yet.
        piece: tokens in a piece of a span.
    """
    first = prompt_length // piece * piece
    trigger = max(RECLUSTER_TOKENS, piece)
    stride = trigger // piece * piece
    written_behind = length - 1 - first
    return first + max(0, (written_behind - trigger) // stride + 1) * stride


@dataclass(frozen=True)
class Spans:
    """The spans that a batch's requests can use, and their entries.

    Attributes:
        entries: int64 [requests, most]; beyond a request's number of spans any entry.
        starts: int64 [requests, most]; position of a span's first token; beyond, 0.
        covered: int64 [requests, most]; how many of a span's tokens its entry covers; beyond, 0.
        counts: int64 [requests].
        clusters: int64 [requests]; of these spans, those that have no members included.
        tokens: int64 [requests]; in the clusters of these spans: all that is covered but sinks.
        cluster_places: int64 [requests, most × clusters]; where the clusters are, counted through all entries.
        cluster_starts: int64, same shape; position of the first token of a cluster's span.
    """

    entries: Tensor
    starts: Tensor
    covered: Tensor
    counts: Tensor
    clusters: Tensor
    tokens: Tensor
    cluster_places: Tensor
    cluster_starts: Tensor

    @property
    def most(self) -> int:
        return self.entries.shape[1]

    def of_requests(self, rows: Tensor) -> Spans:
        """Return the spans of some of the requests, int64 [n]."""
        of_rows = {name: of_all[rows] for name, of_all in vars(self).items()}
        return Spans(**of_rows)


@dataclass(frozen=True)
class Clusters:
    """The clusters of a batch's spans in one layer, for each KV head those of all spans in a row.

    Attributes:
        centroids: [KV heads, requests, clusters, head dim], in the cache's dtype.
        spreads: bfloat16 [KV heads, requests, clusters]; mean squared distance of members from their centroid.
        directions: bfloat16 [KV heads, requests, spans, head dim]; what part each element makes of these distances in a
            span, 1 on average.
        sizes: integers [KV heads, requests, clusters]; 0 beyond what a request's spans cover.
    """

    centroids: Tensor
    spreads: Tensor
    directions: Tensor
    sizes: Tensor


@dataclass(frozen=True)
class HeldSpans:
    """What a request can use of its clusters.

    Attributes:
        entries: int32 [spans]; of consecutive spans, first that in which the sinks end: span 0 where they are less
            than a span.
        end: position behind the last token that they cover; what lies behind is in no cluster.
        built_tokens: how many tokens were clustered anew.
    """

    entries: Tensor
    end: int
    built_tokens: int


class ClusterIndex:
    """Clusters of spans, for all layers, built when first needed.

    An entry is found by the last page that it covers and how many tokens it leaves out. Of two that agree in both, only
    the one that was built later is found.

    Space is found in this order: entries whose tag no longer holds; then

    - without a capacity (how a CPU server runs): new space, so that there are never more entries than live ones or
      than a server on a GPU has, whichever is larger;
    - with one: entries that no request holds, the one that was not used for the longest time first. If there are too
      few of these, spans stay unclustered, those nearest to the context's end. Nothing moves, so CUDA graphs can read
      the tables: a request's entries are written down once, when it takes ``hold`` of them.

    ``ensure``, ``lookup`` and ``hold`` wait for the GPU; ``release`` does not. All of them, and the kernels that read
    the tables, must run on one stream.

    Attributes:
        caches: every layer's KV cache.
        generations: of the pool's pages.
        span: tokens in a span.
        piece: tokens in a piece of a span that is not whole yet.
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
        self.piece = piece_of(span, page_size)
        self.clusters = span // CLUSTER_SIZE
        device = generations.counts.device
        can_fit = gpu_kmeans.fits(self.clusters, self.shape.head_dim)
        self.in_triton = device.type == "cuda" and can_fit if in_triton is None else in_triton
        if self.in_triton and not can_fit:
            raise ValueError(f"span: {span} tokens of {self.shape.head_dim} numbers are too many for a Triton program")
        self._grows = capacity is None
        entries = capacity or 0
        self._tag_pages = torch.full((entries, span // page_size), -1, dtype=torch.int64, device=device)
        self._tag_generations = torch.full_like(self._tag_pages, -1)
        self._tag_last_page = torch.full((entries,), -1, dtype=torch.int64, device=device)
        self._tag_left_out = torch.zeros(entries, dtype=torch.int64, device=device)
        self._last_used = torch.zeros(entries, dtype=torch.int64, device=device)
        self._holders = torch.zeros_like(self._last_used)
        self._held: dict[int, Tensor] = {}
        self._uses = 0
        self._tables = ClusterTables.empty(caches[0], self.shape.layers, entries, span)
        self.layers = self._tables.layers()

    @classmethod
    def for_server(cls, caches: Sequence[LayerCache], generations: PageGenerations, settings: IndexSettings) -> Self:
        """Return the index of a server, on a GPU with entries for all of the pool, and warmed up."""
        del settings
        if not generations.counts.is_cuda:
            return cls(caches, generations)
        # CUDA graphs hold the addresses of its tables: they may not grow.
        index = cls(caches, generations, capacity=_entries_of(caches[0].slots))
        index.warm_up()
        return index

    @classmethod
    def bytes_per_slot(
        cls, shape: PoolShape, page_size: int, settings: IndexSettings = DEFAULT, span: int = SPAN
    ) -> float:
        """Return what the index of a large pool adds to a slot."""
        del settings
        tag_numbers = 2 * span // page_size + 4
        of_entry = ClusterTables.bytes_per_entry(shape, span) + tag_numbers * torch.int64.itemsize
        return of_entry * (1 + 1 / SPANS_OF_PARTIAL) / span

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
            nothing = self._last_used.new_empty(0)
            for tokens in sorted({self.span, self.piece}):
                pages = self._tag_pages[:0, : tokens // self.generations.page_size]
                self._launch(nothing, pages, nothing, nothing)

    def ensure(self, context: Context, request: int, tokens: int, sinks: int = 0) -> int:
        """Build what is missing or outdated of the clusters of a request's first ``tokens`` tokens, all written.

        Args:
            context: the batch's contexts.
            request: the request's row.
            tokens: a multiple of the piece (``clustered_until``).
            sinks: how many of the first tokens are in no cluster.

        Returns:
            How many tokens were clustered anew.

        Raises:
            ValueError: ``tokens`` is no multiple of the piece.
        """
        if tokens % self.piece:
            raise ValueError(f"tokens: must be a multiple of the piece, {self.piece}; it is {tokens}")
        ends = torch.tensor([tokens], device=context.device)
        return self._ensure(self._span_pages(context.rows([request]), ends)[0], tokens, sinks).built_tokens

    def hold(self, holder: int, pages: Tensor, sinks: int = 0) -> HeldSpans:
        """Build what is missing as ``ensure`` does, and keep the first usable spans' entries for ``holder``.

        The entries stay as they are until the holder releases them or takes hold anew, as after further tokens were
        clustered. The holder must keep its pages for as long.

        Args:
            holder: a number of the caller's choice, the request's.
            pages: int64 [pieces × pages in a piece]; the request's leading pages, all written.
            sinks: how many of the first tokens are in no cluster.

        Raises:
            ValueError: the pages are not those of whole pieces.
        """
        tokens = len(pages) * self.generations.page_size
        if tokens % self.piece:
            raise ValueError(f"pages: must fill whole pieces of {self.piece} tokens; they are {len(pages)}")
        of_span = self._tag_pages.shape[1]
        held = self._ensure(F.pad(pages, (0, -len(pages) % of_span), value=-1).view(-1, of_span), tokens, sinks)
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
            tokens: int64 [requests]; multiples of the piece.
            sinks: int64 [requests]; how many of the first tokens are in no cluster; none by default.
        """
        pages = self._span_pages(context, tokens)
        starts = torch.arange(pages.shape[1], device=context.device) * self.span
        covered = (tokens[:, None] - starts).clamp(0, self.span)
        left_out = (torch.zeros_like(tokens) if sinks is None else sinks)[:, None].sub(starts).clamp_min(0)
        entries, usable = self._lookup(pages, left_out)
        usable &= left_out < covered
        counts = usable.sum(1)
        # Usable spans first, in the order of their positions.
        order = (~usable).long().argsort(dim=1, stable=True)[:, : int(counts.max())]
        inside = torch.arange(order.shape[1], device=context.device) < counts[:, None]
        entries, starts, covered = (
            of_spans.gather(1, order).where(inside, 0) for of_spans in (entries, starts.expand_as(entries), covered)
        )
        left_out = left_out.gather(1, order).where(inside, 0)
        places = entries[..., None] * self.clusters + torch.arange(self.clusters, device=context.device)
        return Spans(
            entries,
            starts,
            covered,
            counts,
            covered.sum(1) // CLUSTER_SIZE,
            (covered - left_out).sum(1),
            places.flatten(1),
            starts.repeat_interleave(self.clusters, dim=1),
        )

    def read(self, layer: int, spans: Spans) -> Clusters:
        """Return the clusters of ``spans``."""
        centroids, spreads, directions, sizes = self.layers[layer].read(spans.entries)
        beyond = torch.arange(sizes.shape[2], device=sizes.device) >= spans.clusters[:, None]
        return Clusters(centroids, spreads, directions, sizes.masked_fill_(beyond, 0))

    def member_bytes(self, layer: int) -> int:
        """Return the bytes read to find one member of a cluster: where the cluster begins, and the member's offset."""
        stored = self.layers[layer]
        return stored.firsts.element_size() + stored.offsets.element_size()

    def read_bytes(self, layer: int, spans: Spans) -> Tensor:
        """Return the bytes of what ``read`` reads for each request: int64 [requests]."""
        stored = self.layers[layer]
        return spans.clusters * stored.cluster_bytes + spans.counts * stored.span_bytes

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

    def _span_pages(self, context: Context, tokens: Tensor) -> Tensor:
        """Return the pages of the spans in the first ``tokens``, [requests], positions: [requests, spans, pages].

        -1 stands for those behind them, and for those that are not in the pool.
        """
        page_size, of_span = self.generations.page_size, self._tag_pages.shape[1]
        longest = int(tokens.max())
        first_slots = context.slots[:, :longest:page_size]
        starts = torch.arange(0, longest, page_size, device=context.device)
        is_none = (first_slots >= self.caches[0].slots) | (starts >= tokens[:, None])
        pages = (first_slots // page_size).masked_fill(is_none, -1)
        return F.pad(pages, (0, -pages.shape[1] % of_span), value=-1).unflatten(1, (-1, of_span))

    def _lookup(self, pages: Tensor, left_out: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries of spans and whether they may be used.

        Args:
            pages: [..., pages in a span]; -1 behind those that are covered.
            left_out: [...]; how many of a span's first tokens must be in no cluster.
        """
        if self.entries == 0:
            return torch.zeros_like(left_out), torch.zeros_like(left_out, dtype=torch.bool)
        found = self._with_last_page(_last_of(pages), left_out)
        entries = found.int().argmax(-1)
        matches = (self._tag_pages[entries] == pages) & (self._tag_generations[entries] == self._generations_of(pages))
        return entries, matches.all(-1) & found.any(-1)

    def _generations_of(self, pages: Tensor) -> Tensor:
        """Return how often each of ``pages`` has been begun; 0 for none."""
        return self.generations.counts[pages.clamp_min(0)].where(pages >= 0, 0)

    def _with_last_page(self, last_pages: Tensor, left_out: Tensor) -> Tensor:
        """Return which entries have each span's last page and leave out as much, at most one: bool [..., entries]."""
        is_tagged = self._tag_generations[:, 0] >= 0
        alike = (self._tag_last_page == last_pages[..., None]) & (self._tag_left_out == left_out[..., None])
        return alike & is_tagged

    def _ensure(self, pages: Tensor, tokens: int, sinks: int) -> HeldSpans:
        """Make as many spans behind the sinks usable as there is space for.

        Args:
            pages: [spans, pages in a span]; -1 behind the first ``tokens`` tokens.
            tokens: a multiple of the piece.
            sinks: how many of the first tokens are in no cluster.
        """
        first = sinks // self.span
        pages = pages[first:] if sinks < tokens else pages[:0]
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
        in_pages = int((pages[missing] >= 0).sum()) * self.generations.page_size
        end = min(tokens, (first + usable_spans) * self.span)
        return HeldSpans(entries[:usable_spans].int(), end, in_pages - int(left_out[missing].sum()))

    def _build(self, entries: Tensor, pages: Tensor, left_out: Tensor) -> None:
        """Cluster spans, given as their pages, [n, pages in a span], into ``entries``, [n]."""
        # From here on until the tag is written they belong to no page.
        self._tag_generations[entries] = -1
        self._tables.sizes[:, :, entries] = 0
        is_whole = pages[:, -1] >= 0
        self._build_parts(entries[is_whole], pages[is_whole], 0, left_out[is_whole])
        of_piece = self.piece // self.generations.page_size
        for begin in range(0, self.span, self.piece):
            first = begin // self.generations.page_size
            is_there = ~is_whole & (pages[:, first] >= 0)
            own_left_out = (left_out[is_there] - begin).clamp(0, self.piece)
            self._build_parts(entries[is_there], pages[is_there, first : first + of_piece], begin, own_left_out)
        last_pages = _last_of(pages)
        replaced = self._with_last_page(last_pages, left_out).any(0)
        self._tag_generations[replaced] = -1
        self._tag_pages[entries] = pages
        self._tag_last_page[entries] = last_pages
        self._tag_generations[entries] = self._generations_of(pages)
        self._tag_left_out[entries] = left_out

    def _build_parts(self, entries: Tensor, pages: Tensor, begin: int, left_out: Tensor) -> None:
        """Cluster the parts of spans that begin ``begin`` tokens behind the spans' starts."""
        if not len(entries):
            return
        begins = torch.full_like(entries, begin)
        if self.in_triton:
            self._launch(entries, pages.contiguous(), begins, left_out)
            return
        page_size = self.generations.page_size
        slots = (pages[..., None] * page_size + torch.arange(page_size, device=pages.device)).flatten(1)
        for cache, layer in zip(self.caches, self.layers, strict=True):
            if not cache.windowed:
                layer.build(cache, entries, slots, begins, left_out)

    def _launch(self, entries: Tensor, pages: Tensor, begins: Tensor, left_out: Tensor) -> None:
        tokens = pages.shape[1] * self.generations.page_size
        drawn = self._drawn[tokens].expand(len(pages), -1)
        for own in left_out[left_out > 0].unique().tolist():
            of_these = drawn_behind(own, tokens, tokens // CLUSTER_SIZE).int().to(drawn.device)
            drawn = drawn.where((left_out != own)[:, None], of_these)
        page_size = self.generations.page_size
        gpu_kmeans.cluster_parts(
            self._pools, pages, page_size, entries, begins, left_out, drawn.contiguous(), self._tables
        )

    @cached_property
    def _pools(self) -> KeyPools:
        return KeyPools.of(self.caches)

    @cached_property
    def _drawn(self) -> dict[int, Tensor]:
        """Which keys are the first centroids of a whole span and of a piece, by its tokens."""
        device = self.generations.counts.device
        return {
            tokens: drawn_behind(0, tokens, tokens // CLUSTER_SIZE).int().to(device)
            for tokens in (self.span, self.piece)
        }

    def _claim(self, wanted: int, found: Tensor) -> Tensor:
        """Return up to ``wanted`` entries to build in, none of them held or among those ``found`` for this request."""
        live = (self._tag_generations == self._generations_of(self._tag_pages)).all(1)
        last_used = self._last_used.masked_fill(~live, -1)
        kept = self._holders > 0
        kept[found] = True
        if self._grows:
            kept |= live
        by_use = last_used.masked_fill(kept, torch.iinfo(torch.int64).max).argsort(stable=True)
        free = by_use[: self.entries - int(kept.sum())]
        if self._grows and len(free) < wanted:
            in_pool = _entries_of(self.caches[0].slots, self.span)
            needed = self.entries + wanted - len(free)
            self._grow(max(needed, min(2 * self.entries, in_pool)))
            return self._claim(wanted, found)
        return free[:wanted]

    def _grow(self, entries: int) -> None:
        more = entries - self.entries
        of_tags = (more, self._tag_pages.shape[1])
        self._tag_pages = torch.cat([self._tag_pages, self._tag_pages.new_zeros(of_tags)])
        self._tag_generations = torch.cat([self._tag_generations, self._tag_generations.new_full(of_tags, -1)])
        self._tag_last_page = torch.cat([self._tag_last_page, self._tag_last_page.new_full((more,), -1)])
        self._tag_left_out = torch.cat([self._tag_left_out, self._tag_left_out.new_zeros(more)])
        self._last_used = torch.cat([self._last_used, self._last_used.new_zeros(more)])
        self._holders = torch.cat([self._holders, self._holders.new_zeros(more)])
        self._tables = self._tables.grown(more)
        self.layers = self._tables.layers()


def _entries_of(slots: int, span: int = SPAN) -> int:
    """Return for how many entries there is room in an index of a pool."""
    spans = max(1, -(-slots // span))
    return spans + -(-spans // SPANS_OF_PARTIAL)


def _last_of(pages: Tensor) -> Tensor:
    """Return the last of each span's ``pages``, [..., pages in a span], that is not -1; -1 where none is."""
    last = (pages >= 0).sum(-1, keepdim=True).sub_(1)
    return pages.gather(-1, last.clamp_min(0))[..., 0]
