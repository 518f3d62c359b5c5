"""Clusters of spans by Triton: the same as the reference's, whatever they are built with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.kernels.caches import random_cache
from tests.kernels.gpu.compiling import SHARED_LIMIT, compile_launches
from tests.kernels.gpu.conftest import INTERPRETED
from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.cluster_tables import ClusterTables
from winnow_kernels.indexes.gpu_key_pools import KeyPools
from winnow_kernels.indexes.gpu_kmeans import cluster_parts, fits
from winnow_kernels.indexes.kmeans import ITERATIONS, drawn_behind, kmeans

PAGE, SLOTS, CAPACITY = 16, 1024, 11
# The interpreter cannot multiply matrices of bfloat16, and takes seconds for a problem of full size.
HALF = torch.float16 if INTERPRETED else torch.bfloat16
HEADS = 1 if INTERPRETED else 6
SHAPES = [(96, 256)] if INTERPRETED else [(64, 1024), (96, 1024), (128, 1024), (256, 1024), (128, 512), (128, 64)]


@dataclass
class Case:
    """Spans of a pool, and where their clusters go."""

    caches: list[LayerCache]
    pages: Tensor
    entries: Tensor
    span: int
    left_out: Tensor
    begin: int = 0
    """Where the parts begin that are clustered, in spans twice as long where it is not 0."""

    def empty(self) -> ClusterTables:
        tables = ClusterTables.empty(
            self.caches[0], len(self.caches), CAPACITY, 2 * self.span if self.begin else self.span
        )
        for table in vars(tables).values():
            table.fill_(-7)
        return tables

    def reference(self) -> ClusterTables:
        tables = self.empty()
        slots = (self.pages[..., None] * PAGE + torch.arange(PAGE, device=self.pages.device)).flatten(1)
        for cache, layer in zip(self.caches, tables.layers(), strict=True):
            layer.build(cache, self.entries, slots, torch.full_like(self.entries, self.begin), self.left_out)
        return tables

    def built(self, some: slice = slice(None), iterations: int = ITERATIONS) -> ClusterTables:
        tables = self.empty()
        left_out = self.left_out[some]
        drawn = [drawn_behind(tokens, self.span, self.span // 16) for tokens in left_out.tolist()]
        entries = self.entries[some]
        of_parts = (entries, torch.full_like(entries, self.begin), left_out, torch.stack(drawn).to(left_out.device))
        cluster_parts(KeyPools.of(self.caches), self.pages[some], PAGE, *of_parts, tables, iterations)
        return tables


def a_case(
    device: torch.device,
    spans: int = 2,
    span: int = 64,
    kv_heads: int = 1,
    head_dim: int = 16,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    left_out: int = 0,
) -> Case:
    """Of the first span ``left_out`` tokens are in no cluster."""
    caches = []
    for layer in range(layers):
        cache = random_cache(SLOTS, kv_heads, head_dim, seed=layer, dtype=dtype)
        caches.append(LayerCache(cache.keys.to(device), cache.values.to(device)))
    generator = torch.Generator().manual_seed(5)
    pages = torch.randperm(SLOTS // PAGE, generator=generator)[: spans * span // PAGE].view(spans, -1)
    entries = torch.randperm(CAPACITY, generator=generator)[:spans]
    of_spans = torch.tensor([left_out] + [0] * (spans - 1), device=device)
    return Case(caches, pages.to(device), entries.to(device), span, of_spans)


def tables_of(tables: ClusterTables) -> tuple[Tensor, ...]:
    return tables.sizes, tables.firsts, tables.offsets, tables.centroids


def assert_spreads(built: ClusterTables, expected: ClusterTables) -> None:
    # bfloat16: sums in another order may fall on either side of a rounding.
    torch.testing.assert_close(built.spreads.float(), expected.spreads.float(), rtol=2**-6, atol=1e-3)
    torch.testing.assert_close(built.directions.float(), expected.directions.float(), rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "span", "kv_heads", "head_dim"),
    [
        (torch.float32, 64, 3, 16),
        (torch.float16, 128, 2, 16),
        # Neither 6 clusters, nor keys of 24 numbers, nor spans of 96 fill a power of two.
        (torch.float32, 96, 1, 24),
        (torch.float16, 80, 1, 16),
        (torch.float32, 512, 1, 64),
    ],
)
def test_equals_the_reference(
    device: torch.device, dtype: torch.dtype, span: int, kv_heads: int, head_dim: int
) -> None:
    case = a_case(device, 2, span, kv_heads, head_dim, 1 if span > 128 else 2, dtype)
    of_case, of_reference = case.built(), case.reference()
    for built, expected in zip(tables_of(of_case), tables_of(of_reference), strict=True):
        torch.testing.assert_close(built, expected, atol=1e-6 if dtype == torch.float32 else 0, rtol=0)
    assert_spreads(of_case, of_reference)


@pytest.mark.parametrize("left_out", [0, 20, 64])
def test_a_part_of_a_span_is_written_to_its_place(device: torch.device, left_out: int) -> None:
    case = replace(a_case(device, 2, 64, 2, left_out=left_out), begin=64)
    built, reference = case.built(), case.reference()
    for of_built, expected in zip(tables_of(built), tables_of(reference), strict=True):
        if left_out == 64 and of_built is built.centroids:
            continue  # of no member
        torch.testing.assert_close(of_built, expected, atol=1e-6, rtol=0)
    assert (built.sizes[:, :, :, :4] == -7).all()


@pytest.mark.parametrize(("span", "left_out"), [(64, 1), (64, 16), (96, 40), (64, 62), (96, 95)])
def test_tokens_that_are_left_out_come_last(device: torch.device, span: int, left_out: int) -> None:
    case = a_case(device, 2, span, left_out=left_out)
    # Not to be seen: it would draw all centroids to itself.
    for cache in case.caches:
        cache.keys[case.pages[0, 0] * PAGE] = 1e4
    built = case.built()
    for of_built, expected in zip(tables_of(built), tables_of(case.reference()), strict=True):
        torch.testing.assert_close(of_built, expected, atol=1e-6, rtol=0)
    first, second = case.entries.tolist()
    assert (built.offsets[:, :, first, span - left_out :] == torch.arange(left_out, device=device)).all()
    assert (built.sizes[:, :, first].sum(-1) == span - left_out).all()
    assert (built.sizes[:, :, second].sum(-1) == span).all()
    assert built.centroids[:, :, first].abs().max() < 10
    # Of fewer tokens than clusters each has one.
    assert (built.sizes[:, :, first].amax(-1) == 1).all() == (span - left_out <= span // 16)


def spread(case: Case, tables: ClusterTables) -> float:
    """The squared distances of all members to their stored centroids, which must be their means."""
    total = 0.0
    for cache, layer in zip(case.caches, tables.layers(), strict=True):
        for entry, pages in zip(case.entries, case.pages, strict=True):
            slots = (pages[:, None] * PAGE + torch.arange(PAGE, device=pages.device)).flatten()
            for head in range(cache.kv_heads):
                offsets, sizes = layer.offsets[head, entry].long(), layer.sizes[head, entry].tolist()
                assert sorted(offsets.tolist()) == list(range(case.span))
                clusters = cache.keys[slots, head].float()[offsets].split(sizes)
                for members, centroid in zip(clusters, layer.centroids[head, entry].float(), strict=True):
                    if len(members):
                        torch.testing.assert_close(centroid, members.mean(0), atol=1e-3, rtol=2**-7)
                    total += float((members - centroid).square().sum())
    return total


@pytest.mark.parametrize(("head_dim", "span"), SHAPES)
def test_half_precision_gives_the_references_labels_up_to_ties(device: torch.device, head_dim: int, span: int) -> None:
    """After two iterations, before what a near tie has changed can spread."""
    case = a_case(device, 1, span, HEADS, head_dim, HEADS, HALF)
    built = case.built(iterations=2)
    slots = (case.pages[..., None] * PAGE + torch.arange(PAGE, device=device)).flatten()
    wrong = 0
    for cache, layer in zip(case.caches, built.layers(), strict=True):
        expected, _ = kmeans(cache.keys[slots].transpose(0, 1), span // 16, iterations=2)
        offsets, sizes = layer.offsets[:, case.entries[0]].long(), layer.sizes[:, case.entries[0]].long()
        for head, labels in enumerate(expected):
            clusters = torch.arange(span // 16, device=device).repeat_interleave(sizes[head])
            wrong += int((labels[offsets[head]] != clusters).sum())
    assert wrong <= 0.001 * HEADS * HEADS * span


@pytest.mark.parametrize(("head_dim", "span"), SHAPES)
def test_half_precision_gives_clusters_as_tight_as_the_references(
    device: torch.device, head_dim: int, span: int
) -> None:
    case = a_case(device, 1, span, HEADS, head_dim, HEADS, HALF)
    assert spread(case, case.built()) == pytest.approx(spread(case, case.reference()), rel=0.01)


def test_a_span_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    case = a_case(device, spans=3, kv_heads=2)
    together = case.built()
    for number, entry in enumerate(case.entries.tolist()):
        alone = case.built(slice(number, number + 1))
        for all_of_it, table in zip(tables_of(together), tables_of(alone), strict=True):
            assert torch.equal(all_of_it[:, :, entry], table[:, :, entry])


def test_other_entries_stay_as_they_are(device: torch.device) -> None:
    case = a_case(device)
    others = [entry for entry in range(CAPACITY) if entry not in case.entries.tolist()]
    for built, empty in zip(tables_of(case.built()), tables_of(case.empty()), strict=True):
        assert torch.equal(built[:, :, others], empty[:, :, others])


def test_keys_that_are_all_the_same_fill_one_cluster(device: torch.device) -> None:
    case = a_case(device)
    for cache in case.caches:
        cache.keys.fill_(0.5)
    built = case.built()
    for entry in case.entries.tolist():
        assert built.sizes[0, 0, entry].tolist() == [64] + [0] * 3
        assert built.offsets[0, 0, entry].tolist() == list(range(64))
        assert bool((built.centroids[0, 0, entry] == 0.5).all())


def test_a_pool_may_have_space_between_its_slots(device: torch.device) -> None:
    case = a_case(device)
    wide = [torch.zeros(SLOTS, 2, 1, 16, device=device) for _ in case.caches]
    for pool, cache in zip(wide, case.caches, strict=True):
        pool[:, 0] = cache.keys
    strided = replace(case, caches=[LayerCache(pool[:, 0], pool[:, 1]) for pool in wide])
    for built, expected in zip(tables_of(strided.built()), tables_of(case.built()), strict=True):
        assert torch.equal(built, expected)


def test_caches_are_checked() -> None:
    cache = random_cache(64, 2, 16)
    with pytest.raises(ValueError, match="layout"):
        KeyPools.of([cache, random_cache(64, 1, 16)])
    with pytest.raises(ValueError, match="float64"):
        KeyPools.of([random_cache(64, 2, 16, dtype=torch.float64)])
    with pytest.raises(ValueError, match="next to each other"):
        KeyPools.of([LayerCache(cache.keys.transpose(1, 2), cache.values)])
    shifted = torch.zeros(64 * 2 * 16 + 1)[1:].view(64, 2, 16)
    with pytest.raises(ValueError, match="bytes"):
        KeyPools.of([LayerCache(shifted, shifted)])


def test_too_many_centroids_are_refused(device: torch.device) -> None:
    assert fits(128, 128)
    assert fits(64, 256)
    assert not fits(256, 96)
    case = a_case(device, spans=1, span=1024, head_dim=512)
    with pytest.raises(ValueError, match="too many"):
        case.built()


def _launch(head_dim: int, clusters: int, keys: str) -> None:
    cache = LayerCache(*torch.empty(2, 64, 8, head_dim, dtype=getattr(torch, keys)))
    span = 16 * clusters
    pages, entries = torch.zeros(1, span // PAGE, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    drawn = torch.zeros(1, clusters, dtype=torch.int32)
    tables = ClusterTables.empty(cache, 1, 1, span)
    cluster_parts(KeyPools.of([cache]), pages, PAGE, entries, entries, entries, drawn, tables)


def test_kernels_fit_a_multiprocessor() -> None:
    shapes = [*((head_dim, 64, "bfloat16") for head_dim in (64, 96, 128, 256)), (128, 128, "bfloat16")]
    for shape in [*shapes, (128, 64, "float16")]:
        lloyd, spread_kernel, order = compile_launches(_launch, *shape)
        for kernel in (lloyd, spread_kernel, order):
            assert kernel.local_bytes == 0
            assert kernel.shared_bytes <= SHARED_LIMIT
        assert "wgmma.mma_async" in lloyd.ptx
        assert "cp.async.cg.shared.global" in lloyd.ptx  # keys come 16 bytes at a time
