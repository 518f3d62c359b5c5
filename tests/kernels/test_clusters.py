"""Clusters of spans: built once, shared by prefix, and never used after a page has been written anew."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.caches import random_cache
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.indexes.clusters import ClusterIndex, Spans, clustered_until
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.kmeans import kmeans

SPAN, PAGE, SLOTS, DIM = 64, 16, 1024, 8
LAYERS, KV_HEADS = 2, 2
CPU = torch.device("cpu")


class Server:
    """A pool of pages, its index, and requests made of pages."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.caches = [random_cache(SLOTS, KV_HEADS, DIM, seed=layer, dtype=dtype) for layer in range(LAYERS)]
        self.generations = PageGenerations(SLOTS, PAGE, CPU)
        self.index = ClusterIndex(self.caches, self.generations, SPAN)

    def write(self, pages: list[int], seed: int) -> None:
        """Begin pages and fill them with keys."""
        slots = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()
        self.generations.written(slots)
        generator = torch.Generator().manual_seed(seed)
        for cache in self.caches:
            cache.keys[slots] = torch.randn(len(slots), KV_HEADS, DIM, generator=generator).to(cache.keys.dtype)

    def context(self, *requests: list[int]) -> Context:
        """Requests whose pages are all full."""
        table = torch.full((len(requests), max(map(len, requests)) * PAGE), SLOTS)
        for row, pages in enumerate(requests):
            table[row, : len(pages) * PAGE] = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()
        return Context(table, torch.tensor([len(pages) * PAGE for pages in requests]))

    def usable(self, context: Context) -> list[list[int]]:
        """Starts of the spans that each request can use."""
        spans = self.index.lookup(context, context.lengths // SPAN * SPAN)
        return [starts[:count].tolist() for starts, count in zip(spans.starts, spans.counts, strict=True)]


def members_of(index: ClusterIndex, layer: int, spans: Spans, request: int, head: int) -> list[list[int]]:
    """The positions of each cluster's members."""
    sizes = index.read(layer, spans).sizes.transpose(0, 1).long()
    found = []
    for cluster in range(int(spans.counts[request]) * index.clusters):
        size = int(sizes[request, head, cluster])
        numbers = torch.full((*sizes.shape[:2], size), cluster)
        ranks = torch.arange(size).expand_as(numbers)
        found.append(index.members(layer, spans, numbers, ranks)[request, head].tolist())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_are_the_clusters_of_their_span(dtype: torch.dtype) -> None:
    server = Server(dtype)
    request = [5, 9, 2, 30, 11, 7, 40, 8, 20]
    context = server.context(request)
    assert server.index.ensure(context, 0, 2 * SPAN) == 2 * SPAN
    spans = server.index.lookup(context, torch.tensor([2 * SPAN]))
    for layer, cache in enumerate(server.caches):
        clusters = server.index.read(layer, spans)
        for head in range(KV_HEADS):
            members = members_of(server.index, layer, spans, 0, head)
            assert sorted(chain.from_iterable(members)) == list(range(2 * SPAN))
            for span in range(2):
                keys = cache.keys[context.slots[0, span * SPAN : (span + 1) * SPAN], head]
                labels, centroids = kmeans(keys[None], SPAN // 16)
                at = slice(span * SPAN // 16, (span + 1) * SPAN // 16)
                assert torch.equal(clusters.centroids[head, 0, at], centroids[0].to(dtype))
                expected = [((labels[0] == c).nonzero()[:, 0] + span * SPAN).tolist() for c in range(SPAN // 16)]
                assert members[at] == expected


def test_a_prefix_is_built_once_and_shared() -> None:
    server = Server()
    prefix = list(range(1, 9))
    context = server.context([*prefix, 20, 21, 22, 23], [*prefix, 30, 31])
    assert server.index.ensure(context, 0, 3 * SPAN) == 3 * SPAN
    assert server.index.ensure(context, 1, 2 * SPAN) == 0
    assert server.usable(context) == [[0, 64, 128], [0, 64]]
    spans = server.index.lookup(context, torch.tensor([192, 128]))
    assert spans.entries[0, :2].tolist() == spans.entries[1, :2].tolist()


def test_a_span_with_another_page_is_not_used() -> None:
    server = Server()
    context = server.context([1, 2, 3, 4], [1, 2, 7, 4], [1, 2, 3, 9])
    server.index.ensure(context, 0, SPAN)
    assert server.usable(context) == [[0], [], []]
    # The same last page: the newer entry is the one that is found.
    server.index.ensure(context, 1, SPAN)
    assert server.usable(context) == [[], [0], []]


def test_two_tenants_one_prefix_eviction_and_reuse() -> None:
    server = Server()
    prefix = [1, 2, 3, 4, 5, 6, 7, 8]
    first, second = [*prefix, 10, 11, 12, 13], [*prefix, 14, 15, 16, 17]
    context = server.context(first, second)
    assert server.index.ensure(context, 0, 3 * SPAN) == 3 * SPAN
    assert server.index.ensure(context, 1, 3 * SPAN) == SPAN

    # The first tenant's own pages and the prefix's second span are evicted; another request writes one page of each.
    server.write([11, 6], seed=1)
    assert server.usable(context) == [[0], [0, 128]]
    other = server.context([11, 6, 50, 51])
    assert server.usable(other) == [[]]
    assert server.index.ensure(other, 0, SPAN) == SPAN

    # The second tenant's prefix is prefilled anew, into pages that were used before.
    server.write([10, 12, 13, 7], seed=2)
    again = server.context([1, 2, 3, 4, 10, 12, 13, 7, 14, 15, 16, 17])
    assert server.usable(again) == [[0, 128]]
    assert server.index.ensure(again, 0, 3 * SPAN) == SPAN
    spans = server.index.lookup(again, torch.tensor([192]))
    keys = server.caches[1].keys[again.slots[0, 64:128], 0]
    expected = kmeans(keys[None], 4)[1][0]
    assert torch.equal(server.index.read(1, spans).centroids[0, 0, 4:8], expected)


def test_a_page_written_again_with_the_same_pages_is_built_again() -> None:
    server = Server()
    context = server.context([1, 2, 3, 4])
    server.index.ensure(context, 0, SPAN)
    server.write([3], seed=7)
    assert server.usable(context) == [[]]
    assert server.index.ensure(context, 0, SPAN) == SPAN
    assert server.usable(context) == [[0]]


def test_space_is_bounded() -> None:
    server = Server()
    pages = list(range(1, 61))
    for turn in range(12):
        order: Tensor = torch.randperm(60, generator=torch.Generator().manual_seed(turn))
        request = [pages[i] for i in order.tolist()]
        server.write(request, seed=turn)
        context = server.context(request)
        server.index.ensure(context, 0, 15 * SPAN)
        assert len(server.usable(context)[0]) == 15
        assert server.index.entries <= SLOTS // SPAN


def test_live_entries_are_kept_when_there_are_more_than_the_pool_has_spans() -> None:
    server = Server()
    requests = [[1, 2, 3, last] for last in range(4, 40)]
    context = server.context(*requests)
    for row in range(len(requests)):
        server.index.ensure(context, row, SPAN)
    assert server.usable(context) == [[0]] * 36
    assert 36 <= server.index.entries <= 2 * 36


def test_whole_spans_are_built() -> None:
    server = Server()
    with pytest.raises(ValueError, match="tokens"):
        server.index.ensure(server.context([1, 2, 3, 4, 5]), 0, SPAN + PAGE)


@pytest.mark.parametrize("span", [48, 63, 72])
def test_span_is_checked(span: int) -> None:
    cache: LayerCache = random_cache(64, 1, 4)
    with pytest.raises(ValueError, match="span"):
        ClusterIndex([cache], PageGenerations(64, 16, CPU), span)


@pytest.mark.parametrize(
    ("prompt", "length", "span", "until"),
    [
        (3000, 3001, 1024, 2048),
        (1000, 1001, 1024, 0),
        (3000, 2048 + 2048, 1024, 2048),  # 2,047 written behind the clusters
        (3000, 2048 + 2049, 1024, 4096),
        (3000, 4096 + 2049, 1024, 6144),
        (5000, 4096 + 4096, 4096, 4096),
        (5000, 4096 + 4097, 4096, 8192),
        (100, 2050 + 1, 512, 2048),
    ],
)
def test_when_tokens_are_clustered(prompt: int, length: int, span: int, until: int) -> None:
    assert clustered_until(prompt, length, span) == until


@given(prompt=st.integers(1, 10_000), decoded=st.integers(1, 5000), span=st.sampled_from([64, 256, 768, 1024, 4096]))
def test_the_rule_is_what_a_count_step_by_step_gives(prompt: int, decoded: int, span: int) -> None:
    clustered = prompt // span * span
    for length in range(prompt + 1, prompt + decoded + 1):
        if length - 1 - clustered >= max(2048, span):
            clustered = (length - 1) // span * span
    assert clustered_until(prompt, prompt + decoded, span) == clustered
