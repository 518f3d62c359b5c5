"""The index of key norms, page by page."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.caches import random_cache, scattered_context
from winnow_kernels.indexes.key_norms import KeyNorms, reciprocal_norms
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.indexes.pool_shape import PoolShape

PAGE, SLOTS, DIM = 16, 1024, 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_of_complete_pages_in_every_layer(dtype: torch.dtype) -> None:
    caches = [random_cache(SLOTS, 2, DIM, seed, dtype) for seed in range(3)]
    norms = KeyNorms(caches, PageGenerations(SLOTS, PAGE, torch.device("cpu")))
    context = scattered_context([100], SLOTS)
    pages = norms.generations.complete_pages(context, 0, 100)

    assert norms.ensure(pages) == 6

    for cache, reciprocals in zip(caches, norms.reciprocals, strict=True):
        assert reciprocals.dtype == torch.float32
        for slot in range(SLOTS):
            for head in range(2):
                expected = 1 / float(cache.keys[slot, head].double().norm()) if slot // PAGE in pages else 0
                assert float(reciprocals[slot, head]) == pytest.approx(expected, rel=1e-6)


def test_a_page_begun_anew_is_built_anew() -> None:
    cache = random_cache(SLOTS, 2, DIM)
    norms = KeyNorms([cache], PageGenerations(SLOTS, PAGE, torch.device("cpu")))
    pages = torch.tensor([3, 4])
    norms.ensure(pages)
    cache.keys[3 * PAGE : 5 * PAGE] *= 2
    before = norms.reciprocals[0].clone()
    norms.generations.written(torch.arange(3 * PAGE, 4 * PAGE))

    assert norms.ensure(pages) == 1

    after = norms.reciprocals[0]
    torch.testing.assert_close(after[3 * PAGE : 4 * PAGE], before[3 * PAGE : 4 * PAGE] / 2)
    assert torch.equal(after[4 * PAGE : 5 * PAGE], before[4 * PAGE : 5 * PAGE])


def test_a_key_of_zeros_has_a_finite_reciprocal() -> None:
    assert bool(reciprocal_norms(torch.zeros(2, DIM)).isfinite().all())


def test_half_precision_keys_do_not_overflow() -> None:
    keys = torch.full((1, DIM), 1000.0, dtype=torch.float16)
    assert float(reciprocal_norms(keys)[0]) == pytest.approx(1 / (1000 * DIM**0.5), rel=1e-6)


def test_generations_count_the_pages_that_are_begun() -> None:
    generations = PageGenerations(SLOTS, PAGE, torch.device("cpu"))
    generations.written(torch.tensor([32, 33, 5, 48, 32, 0]))
    generations.written(torch.tensor([47]))
    assert generations.counts.nonzero()[:, 0].tolist() == [0, 2, 3]
    assert generations.counts[:4].tolist() == [1, 0, 2, 1]


@pytest.mark.parametrize(("head_dim", "bounds", "norms"), [(64, 0.0625, 0.0156), (128, 0.0625, 0.0078)])
def test_memory_is_a_small_share_of_the_caches(head_dim: int, bounds: float, norms: float) -> None:
    shape = PoolShape(layers=32, kv_heads=8, head_dim=head_dim, element_size=2)
    assert shape.slot_bytes == 32 * 8 * head_dim * 4
    assert PageBounds.bytes_per_slot(shape, PAGE) / shape.slot_bytes == pytest.approx(bounds, abs=1e-4)
    assert KeyNorms.bytes_per_slot(shape, PAGE) / shape.slot_bytes == pytest.approx(norms, abs=1e-4)


@pytest.mark.parametrize("kind", [PageBounds, KeyNorms])
def test_what_is_predicted_is_what_is_allocated(kind: type[PageBounds | KeyNorms]) -> None:
    caches = [random_cache(SLOTS, 2, DIM, dtype=torch.float16) for _ in range(3)]
    index = kind(caches, PageGenerations(SLOTS, PAGE, torch.device("cpu")))
    tensors = [value for value in vars(index).values() if isinstance(value, torch.Tensor)]
    predicted = kind.bytes_per_slot(PoolShape.of(caches), PAGE)
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == predicted * SLOTS
