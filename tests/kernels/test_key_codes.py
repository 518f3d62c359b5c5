"""The index of low-bit key codes against a plain float64 version."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import codes_float64
from tests.kernels.caches import bytes_allocated, random_cache, random_queries, scattered_context
from winnow_kernels.attend.dense import span_of
from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.key_codes import (
    BITS,
    BLOCK,
    KeyCodes,
    RoundedQueries,
    bytes_of_key,
    packed,
    products,
    rotation,
    rounded,
)
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.indexes.pool_shape import PoolShape

SLOTS = 512
CPU = torch.device("cpu")
HEAD_DIMS = (64, 80, 96, 128, 256)


def codes_of(cache: LayerCache, bits: int, page_size: int = 16) -> KeyCodes:
    """All pages of a cache, built."""
    codes = KeyCodes([cache], PageGenerations(cache.slots, page_size, CPU), bits=bits)
    codes.ensure(torch.arange(cache.slots // page_size))
    return codes


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotation_keeps_lengths_and_angles(head_dim: int) -> None:
    turn = rotation(head_dim).double()
    torch.testing.assert_close(turn @ turn.T, head_dim * torch.eye(head_dim, dtype=torch.float64), atol=1e-4, rtol=0)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_half_precision_holds_a_hadamard_matrix(head_dim: int) -> None:
    assert set(rotation(head_dim).flatten().tolist()) == {-1.0, 1.0}


@given(
    bits=st.sampled_from(BITS),
    numbers=st.lists(st.lists(st.integers(0, 15), min_size=8, max_size=8), min_size=1, max_size=8),
)
@settings(max_examples=50)
def test_packing(bits: int, numbers: list[list[int]]) -> None:
    values = [2 * (number % 2**bits) - 2**bits + 1 for eight in numbers for number in eight]
    packs = packed(torch.tensor(values).float(), bits)
    assert packs.dtype == torch.uint8
    assert packs.tolist() == codes_float64.bytes_of(values, bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 5, 8])
def test_products_of_packed_numbers_are_exact(bits: int, head_dim: int, group: int) -> None:
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(-127, 128, (2, group, head_dim), generator=generator)
    # The largest sums that there can be.
    levels[0, 0] = 127
    values = torch.randint(0, 2**bits, (2, 48, head_dim), generator=generator) * 2 - 2**bits + 1
    values[0, 0], values[0, 1] = 2**bits - 1, 1 - 2**bits
    assert torch.equal(products(levels.to(torch.int8), packed(values, bits), bits).long(), levels @ values.mT)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rounding_is_to_the_nearest_code_with_an_unbiased_factor(bits: int, head_dim: int) -> None:
    vectors = torch.randn(20, head_dim, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 20)[:, None]
    vectors[7] = 0
    values, factors = rounded(vectors, bits)
    for vector, own_values, own_factor in zip(vectors, values, factors, strict=True):
        expected, factor = codes_float64.rounded(vector.double().numpy(), bits)
        if vector.any():
            # A number in the middle between two codes may go to either.
            assert (own_values.numpy() == expected).mean() > 0.99
        assert float(own_factor) == pytest.approx(factor, rel=1e-3)
        assert float(own_factor * (vector @ own_values)) == pytest.approx(float(vector @ vector), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "bits"), [(64, 2), (80, 3), (96, 2), (128, 4), (256, 3)])
@pytest.mark.parametrize("page_size", [16, 64])
def test_scores_equal_the_plain_version(dtype: torch.dtype, head_dim: int, bits: int, page_size: int) -> None:
    cache = random_cache(SLOTS, 2, head_dim, dtype=dtype)
    cache.keys[:] += 2 * torch.randn(2, head_dim, generator=torch.Generator().manual_seed(5))
    codes = codes_of(cache, bits, page_size)
    grouped = random_queries(2, 3, head_dim)
    scale = head_dim**-0.5
    pages = torch.tensor([5, 0, 3])[: 48 // page_size + 1]
    blocks = codes.blocks_of(pages)
    predicted = codes.scores(0, RoundedQueries.of(grouped, scale), blocks)
    assert predicted.shape == (2, 3, len(blocks) * BLOCK)
    assert predicted.dtype == torch.float32
    for head in range(2):
        for number, block in enumerate(blocks.tolist()):
            keys = cache.keys[block * BLOCK : (block + 1) * BLOCK, head].double().numpy()
            own = predicted[head, :, number * BLOCK : (number + 1) * BLOCK].double().numpy()
            errors = np.abs(own - codes_float64.scores(keys, grouped[head].double().numpy(), bits, scale))
            # A channel in the middle between two codes may go to either, which moves one token's scores a little.
            assert ((errors < 2e-3).sum(1) >= BLOCK - 2).all()
            assert errors.max() < 0.5


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("head_dim", [64, 96])
def test_norms_equal_the_plain_version_and_are_near(head_dim: int, bits: int) -> None:
    cache = random_cache(SLOTS, 2, head_dim)
    found = codes_of(cache, bits).norms(0, torch.arange(3, 6))
    for head in range(2):
        for place in range(3):
            keys = cache.keys[(3 + place) * BLOCK : (4 + place) * BLOCK, head].double()
            own = found[head, place * BLOCK : (place + 1) * BLOCK]
            np.testing.assert_allclose(own.numpy(), codes_float64.norms(keys.numpy(), bits), rtol=1e-4)
            torch.testing.assert_close(own.double(), keys.norm(dim=-1), rtol=0.2, atol=0)


def test_a_run_of_blocks_scores_as_its_blocks_do() -> None:
    codes = codes_of(random_cache(SLOTS, 2, 64), 2)
    queries = RoundedQueries.of(random_queries(2, 4, 64), 0.125)
    blocks = torch.arange(3, 9)
    assert isinstance(span_of(blocks), slice)
    assert torch.equal(codes.scores(0, queries, span_of(blocks)), codes.scores(0, queries, blocks))
    each = [codes.scores(0, queries, blocks[[number]]) for number in range(len(blocks))]
    assert torch.equal(codes.scores(0, queries, blocks), torch.cat(each, -1))


@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize("bits", BITS)
def test_the_predicted_score_is_right_on_average_and_nearer_with_more_bits(head_dim: int, bits: int) -> None:
    """Over many keys of one query: without the factor, scores would come out smaller by the code's error."""
    cache = random_cache(65_536, 1, head_dim, seed=bits)
    query = random_queries(1, 1, head_dim, seed=9)
    scale = head_dim**-0.5
    predicted = codes_of(cache, bits).scores(0, RoundedQueries.of(query, scale), slice(0, 4096))[0, 0].double()
    exact = cache.keys[:, 0].double() @ query[0, 0].double() * scale / math.log(2)
    error = predicted - exact
    spread = {2: 0.36, 3: 0.2, 4: 0.11}[bits] * float(exact.std())
    assert 0.7 * spread < float(error.std()) < spread
    assert abs(float(error.mean())) < 4 * float(error.std()) / 256
    # The error does not depend on the score: the slope of predicted over exact scores is 1.
    slope = float(predicted @ exact / (exact @ exact))
    assert slope == pytest.approx(1, abs=4 * float(error.std() / exact.std()) / 256)


def test_queries_are_rounded_to_the_nearest_level() -> None:
    queries = random_queries(3, 2, 96)
    queries[1, 1] = 0
    rounded_queries = RoundedQueries.of(queries, 0.5)
    assert rounded_queries.levels.dtype == torch.int8
    for query, levels, step in zip(
        queries.flatten(0, 1), rounded_queries.levels.flatten(0, 1), rounded_queries.steps.flatten(), strict=True
    ):
        if not query.any():
            assert not levels.any()
            assert step == 0
            continue
        expected, worth = codes_float64.levels_of(query.double().numpy())
        assert (levels.numpy() == expected).mean() > 0.98
        assert abs(levels.numpy() - expected).max() <= 1
        assert int(levels.abs().max()) == 127
        assert float(step) == pytest.approx(worth * 0.5 / math.log(2) / 96, rel=1e-5)


def test_codes_of_complete_pages_in_every_layer() -> None:
    caches = [random_cache(SLOTS, 2, 64, seed) for seed in range(3)]
    generations = PageGenerations(SLOTS, 16, CPU)
    codes = KeyCodes(caches, generations)
    pages = generations.complete_pages(scattered_context([100], SLOTS), 0, 100)

    assert codes.ensure(pages) == 6
    assert codes.ensure(pages) == 0

    for layer, cache in enumerate(caches):
        whole = codes_of(cache, 2)
        for name in ("codes", "factors", "means"):
            own, expected = getattr(codes, name)[layer], getattr(whole, name)[0]
            assert torch.equal(own[pages], expected[pages]), name
            others = torch.ones(len(own), dtype=torch.bool).index_fill_(0, pages, False)
            assert not own[others].any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_an_entry_depends_on_its_page_alone(head_dim: int, dtype: torch.dtype) -> None:
    """What is built page by page, in decode, is to the bit what is built at once, after a retraction."""
    cache = random_cache(SLOTS, 2, head_dim, dtype=dtype)
    at_once = codes_of(cache, 2)
    by_pages = KeyCodes([cache], at_once.generations)
    for page in torch.randperm(SLOTS // 16, generator=torch.Generator().manual_seed(0)).split(3):
        by_pages.ensure(page)
    for name in ("codes", "factors", "means"):
        assert torch.equal(getattr(by_pages, name), getattr(at_once, name)), name


def test_a_page_begun_anew_is_built_anew_and_no_other() -> None:
    cache = random_cache(SLOTS, 2, 64)
    codes = codes_of(cache, 2)
    before = codes.codes[0].clone()
    cache.keys[3 * 16 : 5 * 16] = cache.keys[5 * 16 : 7 * 16]
    codes.generations.written(torch.arange(3 * 16, 4 * 16))

    assert codes.ensure(torch.arange(8)) == 1

    assert torch.equal(codes.codes[0, 3], before[5])
    assert torch.equal(codes.codes[0, 4], before[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_of_zeros_and_of_one_value_score_as_they_are(dtype: torch.dtype) -> None:
    cache = random_cache(64, 1, 64, dtype=dtype)
    cache.keys[:32] = 0
    cache.keys[16:32] = cache.keys[40]
    query = random_queries(1, 1, 64)
    predicted = codes_of(cache, 2).scores(0, RoundedQueries.of(query, 1.0), slice(0, 2))[0, 0]
    exact = cache.keys[:32, 0].double() @ query[0, 0].double() / math.log(2)
    assert predicted[:16].tolist() == [0] * 16
    # The mean is known to 4 bits, and what it is wrong by is rounded to 2 more.
    assert float((predicted - exact).abs().max()) < 0.1 * float(query.norm() * cache.keys[40].float().norm()) / 8


def test_huge_keys_have_finite_scores() -> None:
    cache = random_cache(64, 1, 64)
    cache.keys[:] *= 1e6
    assert bool(
        codes_of(cache, 2).scores(0, RoundedQueries.of(random_queries(1, 1, 64), 0.125), slice(0, 4)).isfinite().all()
    )


@pytest.mark.parametrize("bits", BITS)
def test_what_is_predicted_is_what_is_allocated(bits: int) -> None:
    caches = [random_cache(SLOTS, 2, 128, dtype=torch.float16) for _ in range(3)]
    index = KeyCodes(caches, PageGenerations(SLOTS, 16, CPU), bits=bits)
    shape = PoolShape.of(caches)
    predicted = shape.heads * bytes_of_key(128, bits) + KeyCodes.BYTES_PER_PAGE / 16
    assert bytes_allocated(index) == predicted * SLOTS
    if bits == 2:
        assert KeyCodes.bytes_per_slot(shape, 16) == predicted
        assert predicted / shape.slot_bytes == pytest.approx(0.0744, abs=5e-4)


@pytest.mark.parametrize(
    ("head_dim", "bits", "page_size", "field"), [(64, 1, 16, "bits"), (60, 2, 16, "head_dim"), (64, 2, 8, "page_size")]
)
def test_what_there_are_no_codes_for_is_refused(head_dim: int, bits: int, page_size: int, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: must be"):
        KeyCodes([random_cache(64, 1, head_dim)], PageGenerations(64, page_size, CPU), bits=bits)
