"""Scales of a KV cache in 8 bits: what is written is divided by them, and attention multiplies by them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from sglang_winnow.attention_backend import WinnowAttentionBackend
from sglang_winnow.device.backend import WinnowDeviceBackend
from sglang_winnow.device.dense import DensePlans
from sglang_winnow.device.layers import ModelLayers
from winnow_kernels.attend.dense import prefill
from winnow_kernels.cache import LayerCache

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 4, 2, 64, 40


class Pool:
    """As SGLang's, of one layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.cache = LayerCache(*torch.zeros(2, 64, KV_HEADS, HEAD_DIM).to(dtype))

    def set_kv_buffer(
        self, layer: Any, location: Any, keys: Tensor, values: Tensor, of_keys: Any = None, of_values: Any = None
    ) -> None:
        del layer
        for pool, vectors, scale in ((self.cache.keys, keys, of_keys), (self.cache.values, values, of_values)):
            if pool.dtype != vectors.dtype and scale is not None:
                vectors.div_(scale)
            pool[location.loc] = vectors.to(pool.dtype)

    def get_kv_buffer(self, _layer: int) -> tuple[Tensor, Tensor]:
        return self.cache.keys, self.cache.values


@torch.no_grad()
def output_of(dtype: torch.dtype, scales: tuple[float, float] | None, spread: float) -> Tensor:
    layer = RadixAttention(HEADS, HEAD_DIM, 0.1, KV_HEADS, 0)
    if scales is not None:
        layer.k_scale, layer.v_scale = (torch.nn.Parameter(torch.tensor(scale)) for scale in scales)
        layer.k_scale_float, layer.v_scale_float = scales
    backend: Any = object.__new__(WinnowAttentionBackend)
    backend.token_to_kv_pool = Pool(dtype)
    backend._last_layer = 1
    slots = torch.arange(TOKENS)
    attend = SimpleNamespace(
        attend=lambda _layer, queries, cache, scale, _window: prefill(queries, slots, cache, scale)
    )
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(TOKENS, HEADS * HEAD_DIM, generator=generator) / spread
    keys, values = (spread * torch.randn(TOKENS, KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    batch = SimpleNamespace(out_cache_loc=slots)
    output: Tensor = backend._forward(attend, queries, keys, values, layer, batch, save_kv_cache=True)
    return output


@pytest.mark.parametrize("scales", [(4.0, 0.5), (0.25, 2.0)])
def test_powers_of_two_change_nothing(scales: tuple[float, float]) -> None:
    torch.testing.assert_close(
        output_of(torch.float8_e4m3fn, scales, 1.0), output_of(torch.float8_e4m3fn, None, 1.0), rtol=1e-2, atol=1e-2
    )


def test_scales_hold_what_is_too_large_for_8_bits() -> None:
    exact = output_of(torch.float32, None, 1000.0)
    # torch saturates or writes NaN, as its release does.
    unscaled, scaled = (output_of(torch.float8_e4m3fn, own, 1000.0) for own in (None, (10.0, 10.0)))
    errors = [((own - exact).norm() / exact.norm()).nan_to_num(torch.inf) for own in (unscaled, scaled)]
    assert errors[0] > 0.3
    assert errors[1] < 0.06


def test_a_cache_that_is_wide_enough_is_not_scaled() -> None:
    assert torch.equal(output_of(torch.float32, (4.0, 0.5), 1.0), output_of(torch.float32, None, 1.0))


@torch.no_grad()
@pytest.mark.parametrize("scales", [None, (4.0, 0.5)])
def test_on_a_gpu_decode_multiplies_by_scales(scales: tuple[float, float] | None) -> None:
    layer, backend = device_backend(scales)
    of_keys, of_values = scales or (1.0, 1.0)
    queries, keys, values = (torch.randn(2, heads * HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    own = [vectors.clone().view(2, -1, HEAD_DIM) for vectors in (queries, keys, values)]
    batch = SimpleNamespace(out_cache_loc=torch.arange(2))
    output = backend.forward_decode(queries, *own[1:], layer, batch)
    # What stands for attention returns its queries.
    assert torch.equal(output, (own[0] * of_keys * of_values).flatten(1))
    cache = backend.token_to_kv_pool.cache
    narrow = (keys.view(2, -1, HEAD_DIM) / of_keys).to(torch.float8_e4m3fn)
    assert torch.equal(cache.keys[:2].float(), narrow.float())


@torch.no_grad()
def test_on_a_gpu_dense_requests_beside_sparse_ones_are_scaled_by_the_dense_backend() -> None:
    layer, backend = device_backend((4.0, 0.5))
    given: dict[str, Tensor] = {}

    def forward_extend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        given.update(keys=k, values=v)
        return q

    noted: list[Tensor] = []
    backend._dense = SimpleNamespace(forward_extend=forward_extend)
    backend._prefill = SimpleNamespace(
        is_dense=False,
        dense_tokens=torch.tensor([1, 2]),
        dense_batch=SimpleNamespace(),
        attend=lambda _layer, queries, _scale, output: output.copy_(queries),
        plan=SimpleNamespace(note=lambda _layer, queries, _scale: noted.append(queries)),
    )
    queries = torch.randn(3, HEADS * HEAD_DIM)
    keys, values = (torch.randn(3, KV_HEADS, HEAD_DIM) for _ in range(2))
    before = (keys.clone(), values.clone())
    output = backend.forward_extend(queries, keys, values, layer, SimpleNamespace(out_cache_loc=torch.arange(3)))
    assert torch.equal(output[0], 2 * queries[0])
    assert torch.equal(output[1:], queries[1:])
    # Not as they are in the cache.
    assert torch.equal(given["keys"], before[0][1:])
    assert torch.equal(given["values"], before[1][1:])
    assert torch.equal(noted[0].flatten(1), 4 * queries)


def device_backend(scales: tuple[float, float] | None) -> tuple[RadixAttention, Any]:
    """Return a layer and a backend on a cache in 8 bits, whose attention returns its queries."""
    layer = RadixAttention(HEADS, HEAD_DIM, 0.1, KV_HEADS, 0)
    if scales is not None:
        layer.k_scale, layer.v_scale = (torch.nn.Parameter(torch.tensor(scale)) for scale in scales)
        layer.k_scale_float, layer.v_scale_float = scales
    backend: Any = object.__new__(WinnowDeviceBackend)
    backend.token_to_kv_pool = Pool(torch.float8_e4m3fn)
    backend._caches = [backend.token_to_kv_pool.cache]
    backend._explained, backend.compared, backend._attends_densely = [], [], False
    # The layer is not the last one.
    backend._layers = ModelLayers(full=(0, 1), windows={})
    backend._dense_plans = DensePlans(SimpleNamespace(init_forward_metadata=lambda _batch: None))
    backend._decode = SimpleNamespace(
        variant=SimpleNamespace(is_dense=False), attend=lambda _layer, queries, output: output.copy_(queries)
    )
    return layer, backend
