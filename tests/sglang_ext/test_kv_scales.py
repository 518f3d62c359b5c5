"""Scales of a KV cache in 8 bits: what is written is divided by them, and attention multiplies by them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from sglang_winnow.attention_backend import WinnowAttentionBackend
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
