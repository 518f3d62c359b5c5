"""The index of key norms, page by page."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.caches import random_cache, scattered_context
from winnow_kernels.indexes.key_norms import KeyNorms, reciprocal_norms
from winnow_kernels.indexes.pages import PageGenerations

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
