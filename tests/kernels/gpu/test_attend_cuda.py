"""Attention in CUDA C++ against the torch reference: on the device's GPU, or compiled for the CPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.caches import random_softmax
from tests.kernels.gpu.compiling import SHARED_LIMIT
from tests.kernels.gpu.conftest import INTERPRETED
from tests.kernels.gpu.test_attend import (
    Layer,
    Neighbours,
    actual,
    assert_equal,
    assert_same_bits_alone,
    expected,
    neighbours,
)
from tests.kernels.parameters import termination_at
from winnow_kernels.attend.cuda import kernel
from winnow_kernels.attend.cuda.kernel import blocks_of_multiprocessor, fits, serves, shared_bytes, source_for
from winnow_kernels.batch import ELSEWHERE, WHOLE
from winnow_kernels.cache import LayerCache
from winnow_kernels.cuda.module import compiled
from winnow_kernels.softmax import Softmax

NARROW = torch.float8_e4m3fn
DTYPES = [torch.float16, torch.bfloat16, NARROW]
# A CPU takes 1 ms for a tile.
LONGEST, EXAMPLES = (1500, 10) if INTERPRETED else (20_000, 200)


def stored(layer: Layer, dtype: torch.dtype) -> Layer:
    """The layer with a cache of that dtype, and queries as they go with it."""
    cache = replace(layer.cache, keys=layer.cache.keys.to(dtype), values=layer.cache.values.to(dtype))
    return replace(layer, queries=layer.queries.to(torch.bfloat16 if dtype == NARROW else dtype), cache=cache)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "page_size"),
    [(2, 4, 64, 16), (1, 7, 128, 32), (2, 5, 128, 64), (1, 16, 64, 16), (3, 1, 128, 32), (1, 12, 128, 64)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference(
    kv_heads: int, group: int, head_dim: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    heads = range(kv_heads)
    counts = [[300 + head for head in heads], [64] * kv_heads, [WHOLE] * kv_heads, [WHOLE] * kv_heads, [1] * kv_heads]
    layer = stored(Layer.random([310, 65, 1, 190, 7], counts, group, head_dim, page_size), dtype)
    scale = head_dim**-0.5

    result = actual(layer, scale, None, device, in_cuda=True)

    assert_equal(result, expected(layer, scale, [None] * 5), 2e-2)


@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=3),
    left_out=st.lists(st.none() | st.integers(0, 50), min_size=3, max_size=3),
    scale=st.sampled_from([0.02, 0.125, 1.0, 20.0]),
    softmax=st.sampled_from(["plain", "sinks"]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
@settings(max_examples=EXAMPLES)
def test_equals_the_reference_at_any_length_and_scale(
    lengths: list[int],
    left_out: list[int | None],
    scale: float,
    softmax: str,
    dtype: torch.dtype,
    seed: int,
    device: torch.device,
) -> None:
    counts = [
        [WHOLE if n is None else max(1, length - n - 7 * head) for head in range(2)]
        for length, n in zip(lengths, left_out, strict=False)
    ]
    layer = stored(Layer.random(lengths, counts, group=2, head_dim=64, seed=seed), dtype)
    layer = replace(layer, cache=replace(layer.cache, softmax=random_softmax(softmax, 4, seed)))

    result = actual(layer, scale, None, device, in_cuda=True)

    correct = expected(layer, scale, [None] * len(lengths))
    # Scores of hundreds are as far from the next number of 32 bits as those of one are times that.
    torch.testing.assert_close(result.log_sum_exp, correct.log_sum_exp, atol=1e-5 + 1e-4 * scale, rtol=1e-4)
    assert_equal(result, correct, 2e-2 if scale <= 1 else 5e-2)


@pytest.mark.parametrize("dtype", [torch.float16, NARROW])
def test_many_light_tokens_beside_a_heavy_one_keep_their_weight(dtype: torch.dtype, device: torch.device) -> None:
    layer = Layer.random([1200], [[WHOLE]], group=1, head_dim=64)
    layer.queries[:] = 1.0
    layer.cache.keys[:] = 0.0
    layer.cache.values[:] = 1.0
    heavy = layer.context.slots[0, 700]
    # As heavy as 2^21 others: less than a float16 can say of a weight that is relative to it.
    layer.cache.keys[heavy] = 21 * 0.6931471805599453 / 64
    layer.cache.values[heavy] = 0.0
    layer = stored(layer, dtype)

    result = actual(layer, 1.0, None, device, in_cuda=True)

    of_heavy = float(layer.cache.keys[heavy, 0].float().sum())
    correct = 1199 / (1199 + torch.tensor(of_heavy, dtype=torch.float64).exp())
    torch.testing.assert_close(result.output.double(), correct.expand(1, 1, 64), atol=0, rtol=2e-2)


def test_queries_beyond_halves_are_bounded(device: torch.device) -> None:
    layer = stored(Layer.random([200], [[WHOLE]], group=4, head_dim=64), NARROW)
    layer.queries[:] *= 1e6
    result = actual(layer, 1e-4, None, device, in_cuda=True)
    assert result.output.isfinite().all()
    assert result.log_sum_exp.isfinite().all()


def test_long_contexts_have_longer_splits(device: torch.device) -> None:
    layer = stored(Layer.random([3000, 16600], [[WHOLE], [WHOLE]], group=3, head_dim=64), torch.bfloat16)
    assert_equal(actual(layer, 0.1, None, device, in_cuda=True), expected(layer, 0.1, [None, None]), 2e-2)


@given(neighbours=neighbours(LONGEST // 3, torch.float32))
@settings(max_examples=EXAMPLES)
def test_a_row_gets_the_same_bits_alone_and_among_neighbours(neighbours: Neighbours, device: torch.device) -> None:
    layer, thresholds = neighbours
    assert_same_bits_alone(stored(layer, torch.float16), thresholds, device, in_cuda=True)


@pytest.mark.parametrize("blocks", [1, 7, 40])
def test_a_row_gets_the_same_bits_however_many_blocks_share_the_splits(blocks: int, device: torch.device) -> None:
    counts = [[WHOLE, 300], [1, 64], [ELSEWHERE, ELSEWHERE], [129, WHOLE]]
    layer = stored(Layer.random([1100, 70, 20, 140], counts, group=2, head_dim=128), torch.bfloat16)
    usual = actual(layer, 0.125, None, device, in_cuda=True)
    other = actual(layer, 0.125, None, device, in_cuda=True, blocks=blocks)
    attended = [0, 1, 3]
    assert torch.equal(other.output[attended], usual.output[attended])
    assert torch.equal(other.log_sum_exp[attended], usual.log_sum_exp[attended])
    assert torch.equal(other.counts, usual.counts)
    # What another kernel attends to is left alone.
    assert other.output[2].isnan().all()


def test_rows_that_one_launch_has_no_room_for_get_another(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "PAIRS", 4)
    counts = [[WHOLE, 300], [1, 64], [20, 7], [129, WHOLE], [64, 65]]
    layer = stored(Layer.random([400, 70, 20, 140, 90], counts, group=2, head_dim=64), torch.bfloat16)
    thresholds = [None, termination_at(0.0, 0.0, 1), None, None, None]
    for own in (None, thresholds):
        result = actual(layer, 0.125, own, device, in_cuda=True)
        assert_equal(result, expected(layer, 0.125, own or [None] * 5), 2e-2)


def test_rows_that_may_terminate_are_left_to_another_kernel(device: torch.device) -> None:
    layer = stored(Layer.random([900, 900], [[WHOLE], [800]], group=2, head_dim=64), torch.float16)
    # One that is never calm enough, so that rounding decides nothing.
    thresholds = [termination_at(0.0, 0.0, 1), None]
    result = actual(layer, 0.1, thresholds, device, in_cuda=True)
    assert_equal(result, expected(layer, 0.1, thresholds), 2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_selected_may_hold_anything(dtype: torch.dtype, device: torch.device) -> None:
    layer = stored(Layer.random([100, 40], [[3], [WHOLE]], group=4, head_dim=128), dtype)
    correct = expected(layer, 0.125, [None, None])
    used = torch.cat([layer.slots[0, 0, :3], layer.context.slots[1, :40]])
    unused = torch.ones(layer.cache.slots, dtype=torch.bool)
    unused[used] = False
    for vectors in (layer.cache.keys, layer.cache.values):
        vectors.copy_(vectors.float().masked_fill(unused[:, None, None], torch.nan).to(dtype))
    assert_equal(actual(layer, 0.125, None, device, in_cuda=True), correct, 2e-2)


@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (64, 8), (64, 16), (128, 4), (128, 8), (128, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiles_for_hopper(head_dim: int, group: int, dtype: torch.dtype) -> None:
    cache = LayerCache(*torch.empty(2, 16, 8, head_dim, dtype=dtype))
    assert compiled(source_for(cache, group), "sm_90")
    assert blocks_of_multiprocessor(cache, group) * (shared_bytes(cache, group) + 1024) <= SHARED_LIMIT + 1024


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "softmax"),
    [
        (torch.float32, 128, 4, "plain"),
        (torch.bfloat16, 96, 4, "plain"),
        (torch.bfloat16, 256, 4, "plain"),
        (torch.bfloat16, 128, 4, "cap"),
    ],
)
def test_other_shapes_are_left_to_triton(dtype: torch.dtype, head_dim: int, group: int, softmax: str) -> None:
    cache = LayerCache(*torch.empty(2, 16, 2, head_dim, dtype=dtype), softmax=random_softmax(softmax, 2 * group))
    assert not serves(cache, 2 * group)
    assert serves(LayerCache(*torch.empty(2, 16, 2, 128, dtype=torch.bfloat16), softmax=Softmax()), 2 * group)


@pytest.mark.parametrize(
    ("capability", "shared_kb", "is_served"),
    [((9, 0), 228, True), ((10, 0), 228, True), ((12, 0), 100, False), ((8, 0), 228, False)],
)
def test_gpus_that_lack_what_hopper_has_are_left_to_triton(
    capability: tuple[int, int], shared_kb: int, is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(shared_memory_per_multiprocessor=shared_kb << 10)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    cache = LayerCache(*torch.empty(2, 16, 2, 128, dtype=torch.bfloat16))
    assert fits(torch.device("cuda"), cache, 32) == is_served
