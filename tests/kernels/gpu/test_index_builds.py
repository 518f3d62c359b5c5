"""Page bounds, key codes and clusters, built and extended by Triton: what torch builds, and nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.caches import random_cache
from tests.kernels.gpu.compiling import SHARED_LIMIT, SPARE_BYTES, compile_launches
from winnow_kernels.batch import DecodeBatch
from winnow_kernels.cache import NARROW, LayerCache
from winnow_kernels.indexes.clusters import ClusterIndex
from winnow_kernels.indexes.key_codes import KeyCodes, factors_of_means, is_hadamard, rotation
from winnow_kernels.indexes.page_bounds import PageBounds
from winnow_kernels.indexes.pages import PageGenerations

SLOTS, LAYERS = 512, 2
Pages = PageBounds | KeyCodes
KINDS: list[type[Pages]] = [PageBounds, KeyCodes]
# Numbers of an index that may differ: torch and Triton add up in different orders, and what is at the edge of two codes
# may get either. A mean's code moves the 16 tokens of its block.
SLIPS = 32


def caches_on(
    device: torch.device, kv_heads: int = 2, head_dim: int = 16, dtype: torch.dtype = torch.float32
) -> list[LayerCache]:
    caches = [random_cache(SLOTS, kv_heads, head_dim, seed=layer, dtype=dtype) for layer in range(LAYERS)]
    return [LayerCache(cache.keys.to(device), cache.values.to(device)) for cache in caches]


def assert_same(one: Pages, other: Pages) -> None:
    assert torch.equal(one.built, other.built)
    if isinstance(one, PageBounds) and isinstance(other, PageBounds):
        assert torch.equal(one.bounds.float(), other.bounds.float())
    elif isinstance(one, KeyCodes) and isinstance(other, KeyCodes):
        assert_same_codes(one, other)
    else:
        raise TypeError(f"{type(one)} and {type(other)}")


def assert_same_codes(one: KeyCodes, other: KeyCodes) -> None:
    assert (one.codes != other.codes).sum() <= SLIPS
    assert (one.means != other.means).sum() <= SLIPS
    half = torch.finfo(torch.float16).eps
    assert (~torch.isclose(one.factors.abs(), other.factors.abs(), rtol=half, atol=0)).sum() <= SLIPS
    of_one, of_other = (factors_of_means(codes.factors) for codes in (one, other))
    assert (~torch.isclose(of_one, of_other, rtol=half, atol=0)).sum() <= SLIPS


SHAPES = [
    (torch.float32, 2, 64, 16),
    (torch.bfloat16, 8, 128, 16),
    (torch.float16, 3, 96, 32),
    (torch.bfloat16, 5, 256, 64),
    (torch.float32, 1, 8, 8),
    (torch.float8_e4m3fn, 2, 64, 16),
]


@pytest.mark.parametrize(
    ("kind", "dtype", "kv_heads", "head_dim", "page_size"),
    [(kind, *shape) for kind in KINDS for shape in SHAPES if kind.unfit(*shape[2:]) is None],
)
def test_equals_torch(
    device: torch.device, kind: type[Pages], dtype: torch.dtype, kv_heads: int, head_dim: int, page_size: int
) -> None:
    caches = caches_on(device, kv_heads, head_dim, dtype)
    generations = PageGenerations(SLOTS, page_size, device)
    in_triton, in_torch = (kind(caches, generations, in_triton=triton) for triton in (True, False))
    in_triton.warm_up()
    assert_same(in_triton, in_torch)
    # A page twice, and pages out of order.
    for pages in ([7, 3, 7, 0], [SLOTS // page_size - 1], [3, 2]):
        listed = torch.tensor(pages, device=device)
        assert in_triton.ensure(listed) == in_torch.ensure(listed)
        assert_same(in_triton, in_torch)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (80, 64), (128, 32), (256, 16)])
def test_codes_of_more_bits_equal_torchs(device: torch.device, head_dim: int, page_size: int, bits: int) -> None:
    caches = caches_on(device, 2, head_dim)
    generations = PageGenerations(SLOTS, page_size, device)
    in_triton, in_torch = (KeyCodes(caches, generations, triton, bits) for triton in (True, False))
    listed = torch.tensor([7, 3, 0], device=device)
    assert in_triton.ensure(listed) == in_torch.ensure(listed) == 3
    assert_same(in_triton, in_torch)
    blocks = in_torch.blocks_of(listed)
    factors = in_torch.factors[:, blocks]
    assert (factors != 0).all()
    assert (factors_of_means(factors) > 0).all()


def test_codes_of_zeros_are_zeros(device: torch.device) -> None:
    keys = torch.zeros(SLOTS, 2, 64, device=device)
    generations = PageGenerations(SLOTS, 16, device)
    in_triton, in_torch = (KeyCodes([LayerCache(keys, keys)], generations, triton) for triton in (True, False))
    listed = torch.tensor([4], device=device)
    for index in (in_triton, in_torch):
        index.ensure(listed)
        assert not index.factors.any()
        assert not factors_of_means(index.factors).any()
    assert torch.equal(in_triton.codes, in_torch.codes)


@pytest.mark.parametrize("kind", KINDS)
def test_extends_rows_whose_newest_token_begins_a_page(device: torch.device, kind: type[Pages]) -> None:
    caches = caches_on(device)
    generations = PageGenerations(SLOTS, 16, device)
    generations.counts += torch.arange(len(generations.counts), device=device)
    in_triton, in_torch = (kind(caches, generations, in_triton=triton) for triton in (True, False))
    # In the middle of a page, at its end, at the next one's begin; not active; padding.
    lengths = [24, 32, 33, 65, 17, 33, 1]
    active = [1, 1, 1, 2048, 1, 0, 1]
    batch = DecodeBatch.empty(len(lengths), 80, 16, device)
    batch.lengths.copy_(torch.tensor(lengths))
    batch.page_table.copy_(torch.arange(35).view(7, 5).flip(0))
    in_triton.extend(batch, torch.tensor(active, dtype=torch.int32, device=device))
    completed = batch.page_table[[2, 3, 4], [1, 3, 0]].long()
    in_torch.ensure(completed)
    assert_same(in_triton, in_torch)
    assert in_triton.ensure(completed) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [16, 32])
def test_pages_with_keys_written_anew_are_built_once_more(
    device: torch.device, kind: type[Pages], page_size: int
) -> None:
    """A check has written positions 15 to 31 of the first row, 24 to 40 of the second, and none of the third."""
    caches = caches_on(device)
    generations = PageGenerations(SLOTS, page_size, device)
    index, anew = kind(caches, generations, in_triton=True), kind(caches, generations, in_triton=False)
    batch = DecodeBatch.empty(4, 128, page_size, device)
    pages = torch.arange(4 * (128 // page_size), device=device).view(4, -1) % (SLOTS // page_size)
    batch.page_table.copy_(pages)
    batch.lengths.copy_(torch.tensor([33, 42, 70, 42]))
    everything = torch.arange(SLOTS // page_size, device=device)
    index.ensure(everything)
    index.warm_up()
    for seed, cache in enumerate(caches):
        cache.keys.copy_(random_cache(SLOTS, 2, 16, seed=10 + seed).keys)
    written = torch.cat([pages[0, : 32 // page_size], pages[1, : 32 // page_size], pages[3, : 32 // page_size]])
    generations.rewritten(written * page_size)
    batch.anew_from[:2] = torch.tensor([15, 24], dtype=torch.int32)
    index.extend(batch, torch.tensor([1, 1, 1, 1], dtype=torch.int32, device=device))
    # The second row's first page of 16 holds no token that is anew.
    wanted = torch.cat([pages[0, : 32 // page_size], pages[1, 24 // page_size : 32 // page_size]])
    assert torch.equal(index.built[wanted], generations.counts[wanted])
    others = everything[~torch.isin(everything, wanted)]
    anew.ensure(everything)
    assert (index.built[pages[3, : 32 // page_size]] != generations.counts[pages[3, : 32 // page_size]]).all()
    part, whole = (
        (own.bounds if isinstance(own, PageBounds) else own.codes).reshape(LAYERS, len(everything), -1)
        for own in (index, anew)
    )
    slips = 0 if isinstance(index, PageBounds) else SLIPS
    assert (part[:, wanted] != whole[:, wanted]).sum() <= slips
    assert (part[:, others] != whole[:, others]).sum() > slips


@pytest.mark.parametrize("kind", KINDS)
def test_keeps_up_with_decoding(device: torch.device, kind: type[Pages]) -> None:
    caches = caches_on(device)
    generations = PageGenerations(SLOTS, 16, device)
    index, reference = kind(caches, generations, in_triton=True), kind(caches, generations, in_triton=False)
    batch = DecodeBatch.empty(2, 80, 16, device)
    batch.page_table.copy_(torch.tensor([[3, 9, 4, 1, 7], [20, 21, 22, 23, 24]]))
    active = torch.ones(2, dtype=torch.int32, device=device)
    prompts = [30, 32]
    generator = torch.Generator().manual_seed(3)
    for step in range(40):
        lengths = [prompt + step + 1 for prompt in prompts]
        batch.lengths.copy_(torch.tensor(lengths))
        newest = torch.tensor([length - 1 for length in lengths], device=device)
        slots = batch.page_table[[0, 1], newest // 16].long() * 16 + newest % 16
        generations.written(slots)
        complete = torch.cat([batch.page_table[row, : (n - 1) // 16] for row, n in enumerate(lengths)]).long()
        if step == 0:
            index.ensure(complete)
        index.extend(batch, active)
        for cache in caches:
            cache.keys[slots] = torch.randn(2, 2, 16, generator=generator).to(device)
        reference.ensure(complete)
        assert index.ensure(complete) == 0
        assert_same(index, reference)


def test_bounds_hold_every_number_of_8_bits(device: torch.device) -> None:
    """Of pages that each have one of the 254 in all places; two are no numbers."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[numbers % 128 != 127].view(torch.float8_e4m3fn)
    keys = numbers.repeat_interleave(8)[:, None, None].expand(-1, 1, 16).contiguous().to(device)
    index = PageBounds([LayerCache(keys, keys)], PageGenerations(len(keys), 8, device), in_triton=True)
    index.ensure(torch.arange(len(numbers), device=device))
    expected = numbers.float()[:, None].expand(-1, 32)
    assert torch.equal(index.bounds[0, :, 0].float().cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_clusters_are_those_of_torch(device: torch.device, dtype: torch.dtype) -> None:
    caches = caches_on(device, dtype=dtype)
    generations = PageGenerations(SLOTS, 16, device)
    pages = torch.tensor([5, 1, 9, 2, 8, 3, 7, 4, 20, 21, 22, 23], device=device)
    indexes = [ClusterIndex(caches, generations, 64, 4, in_triton=triton) for triton in (True, False)]
    indexes[0].warm_up()
    held = [index.hold(0, pages) for index in indexes]
    assert [h.built_tokens for h in held] == [192, 192]
    assert held[0].entries.tolist() == held[1].entries.tolist()
    for one, other in zip(*(index.layers for index in indexes), strict=True):
        for name in ("sizes", "firsts", "offsets", "centroids"):
            # Centroids of narrow keys are in bfloat16, where sums in another order may fall to the next number.
            rtol = 2**-7 if name == "centroids" and dtype in NARROW else 0
            torch.testing.assert_close(getattr(one, name), getattr(other, name), atol=1e-6, rtol=rtol)


def test_a_span_too_long_for_a_program_is_refused() -> None:
    generations = PageGenerations(8192, 16, torch.device("cpu"))
    caches = [random_cache(8192, 1, 128)]
    with pytest.raises(ValueError, match="4096 tokens of 128 numbers"):
        ClusterIndex(caches, generations, 4096, in_triton=True)
    ClusterIndex(caches, generations, 4096, in_triton=False)


def _launch(head_dim: int, kv_heads: int, page_size: int) -> None:
    keys = torch.empty(4096, kv_heads, head_dim, dtype=torch.bfloat16)
    batch = DecodeBatch.empty(2, 256, page_size, keys.device)
    for kind in KINDS:
        index = kind([LayerCache(keys, keys)] * 2, PageGenerations(len(keys), page_size, keys.device), in_triton=True)
        if isinstance(index, KeyCodes):
            # As on a GPU.
            index.turn = rotation(head_dim).to(keys.dtype if is_hadamard(head_dim) else torch.float32)
        index.entries.build(torch.empty(16, dtype=torch.int64))
        index.extend(batch, batch.lengths)


def test_kernels_fit_a_multiprocessor() -> None:
    for shape in ((128, 8, 16), (96, 8, 64), (80, 4, 16), (256, 8, 16)):
        compiled = compile_launches(_launch, *shape)
        assert len(compiled) == 2 * len(KINDS)
        for kernel in compiled:
            assert kernel.local_bytes <= SPARE_BYTES, kernel
            assert kernel.shared_bytes <= SHARED_LIMIT
            # Keys come 16 bytes at a time, or ahead of the product that they are for.
            assert "ld.global.v4.b32" in kernel.ptx or "cp.async" in kernel.ptx
