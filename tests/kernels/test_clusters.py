"""Clusters of spans: built once, shared by prefix, and never used after a page has been written anew."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.caches import random_cache
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.indexes.clusters import ClusterIndex, Spans, clustered_until
from winnow_kernels.indexes.kmeans import kmeans
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.indexes.pool_shape import PoolShape

SPAN, PAGE, SLOTS, DIM = 64, 16, 1024, 8
LAYERS, KV_HEADS = 2, 2
CPU = torch.device("cpu")


class Server:
    """A pool of pages, its index, and requests made of pages."""

    def __init__(self, dtype: torch.dtype = torch.float32, capacity: int | None = None) -> None:
        self.caches = [random_cache(SLOTS, KV_HEADS, DIM, seed=layer, dtype=dtype) for layer in range(LAYERS)]
        self.generations = PageGenerations(SLOTS, PAGE, CPU)
        self.index = ClusterIndex(self.caches, self.generations, SPAN, capacity)

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

    def hold(self, holder: int, pages: list[int], sinks: int = 0) -> list[int]:
        """The entries that ``holder`` holds of the spans of ``pages``."""
        return self.index.hold(holder, torch.tensor(pages, dtype=torch.int64), sinks).entries.tolist()

    def assert_entry(self, entry: int, pages: list[int], left_out: int = 0) -> None:
        """The entry holds the clusters of the keys that are in ``pages`` now, but for the first."""
        slots = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()
        for cache, layer in zip(self.caches, self.index.layers, strict=True):
            labels, centroids = kmeans(cache.keys[slots[left_out:]].transpose(0, 1), SPAN // 16)
            assert torch.equal(layer.centroids[:, entry], centroids)
            offsets = left_out + labels.argsort(dim=1, stable=True)
            assert torch.equal(layer.offsets[:, entry, : SPAN - left_out].long(), offsets)
            assert layer.sizes[:, entry].tolist() == [row.bincount(minlength=SPAN // 16).tolist() for row in labels]
            assert bool((layer.firsts[:, entry, 0] == entry * SPAN).all())


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


def test_the_span_in_which_sinks_end_is_a_requests_own() -> None:
    server = Server(capacity=5)
    pages = list(range(1, 9))
    entries = {sinks: server.hold(sinks, pages, sinks) for sinks in (0, 16, 40)}
    assert {first for first, _ in entries.values()} == {entries[0][0], entries[16][0], entries[40][0]}
    assert len({first for first, _ in entries.values()}) == 3
    assert len({second for _, second in entries.values()}) == 1
    for sinks, (first, second) in entries.items():
        server.assert_entry(first, pages[:4], sinks)
        server.assert_entry(second, pages[4:])
    # Found again, and not built.
    assert server.index.hold(3, torch.tensor(pages), 16).built_tokens == 0
    # There is no space for others: their second span is of no use without the first.
    assert len(server.hold(4, pages, 33)) == 2
    assert server.hold(5, pages, 34) == []


def test_spans_of_sinks_alone_are_not_built() -> None:
    server = Server(capacity=2)
    pages = list(range(1, 17))
    held = server.index.hold(1, torch.tensor(pages), 2 * SPAN + 10)
    assert held.built_tokens == 2 * SPAN - 10
    server.assert_entry(held.entries.tolist()[0], pages[8:12], 10)
    context = server.context(pages, pages, pages)
    spans = server.index.lookup(context, torch.full((3,), 4 * SPAN), torch.tensor([2 * SPAN + 10, 3 * SPAN, 500]))
    assert spans.counts.tolist() == [2, 1, 0]
    assert spans.tokens.tolist() == [2 * SPAN - 10, SPAN, 0]
    assert spans.starts[0].tolist() == [2 * SPAN, 3 * SPAN]
    assert server.index.hold(2, torch.tensor(pages), 4 * SPAN).built_tokens == 0


def test_a_capacity_is_kept_and_nothing_moves() -> None:
    server = Server(capacity=3)
    addresses = [layer.centroids.data_ptr() for layer in server.index.layers]
    for turn in range(4):
        pages = list(range(1 + 12 * turn, 13 + 12 * turn))
        entries = server.hold(turn, pages)
        assert sorted(entries) == [0, 1, 2]
        for number, entry in enumerate(entries):
            server.assert_entry(entry, pages[4 * number : 4 * number + 4])
        server.index.release(turn)
    assert server.index.entries == 3
    assert [layer.centroids.data_ptr() for layer in server.index.layers] == addresses


def test_what_is_held_is_not_replaced() -> None:
    server = Server(capacity=3)
    first, second = [1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]
    entries = server.hold(1, first)
    assert len(entries) == 2
    # One entry is left: the second request's last span stays unclustered.
    held = server.index.hold(2, torch.tensor(second))
    assert len(held.entries) == 1
    assert held.built_tokens == SPAN
    assert server.usable(server.context(first, second)) == [[0, 64], [0]]
    assert server.hold(3, [21, 22, 23, 24]) == []
    for entry, pages in zip(entries, (first[:4], first[4:]), strict=True):
        server.assert_entry(entry, pages)

    server.index.release(1)
    assert len(server.hold(2, second)) == 2
    server.index.release(2)
    server.index.release(2)  # a request that holds nothing
    assert len(server.hold(3, [21, 22, 23, 24])) == 1


def test_a_request_does_not_replace_its_own_spans() -> None:
    server = Server(capacity=2)
    pages = list(range(1, 13))
    server.index.ensure(server.context(pages), 0, 2 * SPAN)
    server.write(pages[:4], seed=1)
    # The second span's clusters are used by nobody, and older than any; to the third they must not go.
    held = server.index.hold(1, torch.tensor(pages))
    assert held.built_tokens == SPAN
    assert len(held.entries) == 2
    server.assert_entry(held.entries.tolist()[1], pages[4:8])


def test_what_was_used_last_is_replaced_last() -> None:
    server = Server(capacity=3)
    spans = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
    for holder in (0, 1, 2, 0):
        server.hold(holder, spans[holder])
        server.index.release(holder)
    server.hold(3, spans[3])
    assert server.usable(server.context(*spans)) == [[0], [], [0], [0]]


def test_a_shared_span_is_held_until_the_last_holder_lets_go() -> None:
    server = Server(capacity=1)
    shared, other = [1, 2, 3, 4], [5, 6, 7, 8]
    assert server.hold(1, shared) == server.hold(2, shared) == [0]
    server.index.release(1)
    assert server.hold(3, other) == []
    server.index.release(2)
    assert server.hold(3, other) == [0]
    server.assert_entry(0, other)


def test_a_holder_grows() -> None:
    server = Server(capacity=4)
    pages = list(range(1, 17))
    entries = server.hold(1, pages[:8])
    held = server.index.hold(1, torch.tensor(pages))
    assert held.built_tokens == 2 * SPAN
    assert held.entries.tolist()[:2] == entries
    assert held.entries.dtype == torch.int32
    server.index.release(1)
    assert len(server.hold(2, list(range(21, 37)))) == 4


@given(data=st.data(), capacity=st.integers(1, 8))
@settings(max_examples=40)
def test_held_entries_are_sound_whatever_comes_and_goes(data: st.DataObject, capacity: int) -> None:
    """Tenants share prefixes, finish, and are evicted; pages are written anew; entries are replaced; sinks differ."""
    server = Server(capacity=capacity)
    free = list(range(1, SLOTS // PAGE))
    prefixes: list[tuple[int, ...]] = [()]
    running: dict[int, tuple[tuple[int, ...], list[int], int]] = {}
    writes = 0
    for holder in range(data.draw(st.integers(1, 14), label="events")):
        event = data.draw(st.sampled_from(["start", "start", "grow", "finish", "evict"]), label="event")
        if event in ("start", "grow"):
            who = holder
            pages = data.draw(st.sampled_from(prefixes), label="prefix")
            if event == "grow" and running:
                who = data.draw(st.sampled_from(sorted(running)), label="who")
                pages = running[who][0]
            new = [free.pop(0) for _ in range(4 * data.draw(st.integers(0, 2), label="spans")) if len(free) > 8]
            new = new[: len(new) // 4 * 4]
            if new:
                writes += 1
                server.write(new, seed=writes)
            pages = (*pages, *new)
            running[who] = pages, server.hold(who, list(pages), who % 2 * 16), who % 2 * 16
            prefixes = [*prefixes, *(pages[:end] for end in range(4, len(pages) + 1, 4) if pages[:end] not in prefixes)]
            others = {span for other, held in running.items() if other != who for span in _spans(*held)}
            wanted = {(pages[at : at + 4], who % 2 * 16 * (at == 0)) for at in range(0, len(pages), 4)}
            assert len(running[who][1]) == len(wanted) or len(others | wanted) > capacity
        elif event == "finish" and running:
            who = data.draw(st.sampled_from(sorted(running)), label="who")
            del running[who]
            server.index.release(who)
        elif event == "evict":
            used = {page for pages, *_ in running.values() for page in pages}
            gone = {page for pages in prefixes for page in pages} - used
            prefixes = [pages for pages in prefixes if not gone & set(pages)]
            free = [*sorted(gone), *free]
        for held in running.values():
            for (span, left_out), entry in _spans(*held).items():
                server.assert_entry(entry, list(span), left_out)


def _spans(pages: tuple[int, ...], entries: list[int], sinks: int) -> dict[tuple[tuple[int, ...], int], int]:
    """The spans of a request that are held, with how much they leave out, and their entries."""
    return {
        (pages[4 * number : 4 * number + 4], sinks if number == 0 else 0): entry for number, entry in enumerate(entries)
    }


def test_holders_bring_whole_pieces() -> None:
    server = Server()
    index = ClusterIndex(server.caches, server.generations, 4 * SPAN)
    with pytest.raises(ValueError, match="pages"):
        index.hold(1, torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="tokens"):
        index.ensure(server.context([1, 2, 3, 4]), 0, 3 * PAGE)


class LargeSpans(Server):
    """Its spans have 16 pages, and their pieces 4, which is 64 tokens in 4 clusters."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ClusterIndex(self.caches, self.generations, 16 * PAGE)

    def assert_parts(self, spans: Spans, request: int, pages: list[int], parts: list[tuple[int, int]]) -> None:
        """The clusters are those of the parts of the context, each by itself: (begin, end) in tokens."""
        slots = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()
        for layer, cache in enumerate(self.caches):
            clusters = self.index.read(layer, spans)
            members = [members_of(self.index, layer, spans, request, head) for head in range(KV_HEADS)]
            at = 0
            for begin, end in parts:
                keys = cache.keys[slots[begin:end]].transpose(0, 1)
                labels, centroids = kmeans(keys, (end - begin) // 16)
                own = slice(at, at + centroids.shape[1])
                assert torch.equal(clusters.centroids[:, request, own], centroids)
                for head in range(KV_HEADS):
                    of_labels = [(labels[head] == c).nonzero()[:, 0] + begin for c in range(centroids.shape[1])]
                    assert members[head][own] == [one.tolist() for one in of_labels]
                    distances = (keys[head] - centroids[head, labels[head]]).square().sum(-1)
                    expected = torch.stack([distances[labels[head] == c].mean() for c in range(centroids.shape[1])])
                    torch.testing.assert_close(
                        clusters.spreads[head, request, own].float(), expected, rtol=2**-8, atol=1e-6
                    )
                at += centroids.shape[1]
            assert not clusters.sizes[:, request, at:].any()
        assert int(spans.clusters[request]) == at


def test_the_end_of_a_context_is_clustered_in_pieces_until_the_span_is_whole() -> None:
    server = LargeSpans()
    pages = list(range(1, 41))
    context = server.context(pages)
    # Whole spans of 256 tokens; behind them pieces of 64.
    for tokens, built, parts in (
        (128, 128, [(0, 64), (64, 128)]),
        (192, 192, [(0, 64), (64, 128), (128, 192)]),
        (256, 256, [(0, 256)]),
        (320, 64, [(0, 256), (256, 320)]),
        (576, 256 + 64, [(0, 256), (256, 512), (512, 576)]),
    ):
        assert server.index.ensure(context, 0, tokens) == built
        assert server.index.ensure(context, 0, tokens) == 0
        spans = server.index.lookup(context, torch.tensor([tokens]))
        assert int(spans.tokens) == tokens
        assert int(spans.covered.sum()) == tokens
        server.assert_parts(spans, 0, pages, parts)


def test_requests_at_different_points_of_a_context_have_entries_of_their_own() -> None:
    server = LargeSpans()
    prefix = list(range(1, 9))
    whole, fork = [*prefix, *range(9, 17)], [*prefix, *range(20, 28)]
    context = server.context(prefix, whole, fork)
    ends = torch.tensor([128, 256, 192])
    for row, tokens in enumerate(ends.tolist()):
        assert server.index.ensure(context, row, tokens) == tokens
    spans = server.index.lookup(context, ends)
    assert len(spans.entries.unique()) == 3
    server.assert_parts(spans, 0, prefix, [(0, 64), (64, 128)])
    server.assert_parts(spans, 1, whole, [(0, 256)])
    server.assert_parts(spans, 2, fork, [(0, 64), (64, 128), (128, 192)])
    # A page of the shared part is written anew: nobody may use what was built from it.
    server.write([3], seed=7)
    assert server.index.lookup(context, ends).counts.tolist() == [0, 0, 0]
    # A page behind the pieces of the first matters to the others alone.
    for row, tokens in enumerate(ends.tolist()):
        server.index.ensure(context, row, tokens)
    server.write([9, 20], seed=8)
    assert server.index.lookup(context, ends).counts.tolist() == [1, 0, 0]


@pytest.mark.parametrize("sinks", [0, 16, 64, 80, 130])
def test_sinks_may_end_in_any_piece(sinks: int) -> None:
    server = LargeSpans()
    context = server.context(list(range(1, 11)))
    assert server.index.ensure(context, 0, 128, sinks) == max(0, 128 - sinks)
    spans = server.index.lookup(context, torch.tensor([128]), torch.tensor([sinks]))
    assert int(spans.tokens) == max(0, 128 - sinks)
    if sinks < 128:
        members = members_of(server.index, 0, spans, 0, 0)
        assert sorted(chain.from_iterable(members)) == list(range(sinks, 128))


def test_a_holder_of_pieces_keeps_them_while_another_grows() -> None:
    server = LargeSpans()
    pages = list(range(1, 17))
    first = server.index.hold(1, torch.tensor(pages[:4]))
    assert (first.end, first.built_tokens) == (64, 64)
    second = server.index.hold(2, torch.tensor(pages))
    assert (second.end, second.built_tokens) == (256, 256)
    assert first.entries.tolist() != second.entries.tolist()
    assert server.index.hold(3, torch.tensor(pages[:4])).entries.tolist() == first.entries.tolist()


@pytest.mark.parametrize(("head_dim", "share"), [(64, 0.0484), (96, 0.0446), (128, 0.0427), (256, 0.0399)])
def test_memory_is_at_most_a_twentieth_of_the_caches(head_dim: int, share: float) -> None:
    shape = PoolShape(layers=32, kv_heads=8, head_dim=head_dim, element_size=2)
    assert ClusterIndex.bytes_per_slot(shape, PAGE) / shape.slot_bytes == pytest.approx(share, abs=1e-4)


def test_what_is_predicted_is_what_is_allocated() -> None:
    slots = 6 * 1024
    caches = [random_cache(slots, KV_HEADS, DIM, dtype=torch.bfloat16) for _ in range(LAYERS)]
    index = ClusterIndex(caches, PageGenerations(slots, PAGE, CPU), 256, capacity=24 + 24 // 6)
    tensors = [value for value in [*vars(index).values(), *vars(index._tables).values()] if isinstance(value, Tensor)]
    predicted = ClusterIndex.bytes_per_slot(PoolShape.of(caches), PAGE, span=256)
    allocated = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert allocated == pytest.approx(predicted * slots)


def test_layers_must_be_alike() -> None:
    caches = [random_cache(64, 1, 8), random_cache(64, 1, 16)]
    with pytest.raises(ValueError, match="one shape"):
        ClusterIndex(caches, PageGenerations(64, 16, CPU), 64)


def test_capacity_is_checked() -> None:
    with pytest.raises(ValueError, match="capacity"):
        Server(capacity=0)


@pytest.mark.parametrize("span", [48, 63, 72])
def test_span_is_checked(span: int) -> None:
    cache: LayerCache = random_cache(64, 1, 4)
    with pytest.raises(ValueError, match="span"):
        ClusterIndex([cache], PageGenerations(64, 16, CPU), span)


@pytest.mark.parametrize(
    ("prompt", "length", "piece", "until"),
    [
        (3000, 3001, 256, 2816),
        (200, 201, 256, 0),
        (3000, 2816 + 512, 256, 2816),  # 511 written behind the clusters
        (3000, 2816 + 513, 256, 3328),
        (3000, 3328 + 513, 256, 3840),
        (5000, 4096 + 1024, 1024, 4096),
        (5000, 4096 + 1025, 1024, 5120),
        (100, 640 + 1, 128, 512),
    ],
)
def test_when_tokens_are_clustered(prompt: int, length: int, piece: int, until: int) -> None:
    assert clustered_until(prompt, length, piece) == until


@given(prompt=st.integers(1, 10_000), decoded=st.integers(1, 5000), piece=st.sampled_from([16, 64, 192, 256, 1024]))
def test_the_rule_is_what_a_count_step_by_step_gives(prompt: int, decoded: int, piece: int) -> None:
    clustered = prompt // piece * piece
    for length in range(prompt + 1, prompt + decoded + 1):
        if length - 1 - clustered >= max(512, piece):
            clustered = (length - 1) // piece * piece
    assert clustered_until(prompt, prompt + decoded, piece) == clustered
