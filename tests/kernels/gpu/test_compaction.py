"""What is kept of a prompt, moved on the device, lies where the torch reference moves it."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.caches import random_cache, scattered_context
from tests.kernels.gpu.selectors import cache_on
from winnow_kernels.cache import LayerCache
from winnow_kernels.decode import gpu_compaction
from winnow_kernels.decode.compaction import compact
from winnow_kernels.decode.gpu_compaction import Compaction

SLOTS, LENGTH = 1024, 300
EIGHT_BITS = torch.float8_e4m3fn


def _caches(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[LayerCache]:
    made = [random_cache(SLOTS, kv_heads, head_dim, seed=layer) for layer in range(layers)]
    return [LayerCache(cache.keys.to(dtype), cache.values.to(dtype)) for cache in made]


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 24), (torch.bfloat16, 64), (EIGHT_BITS, 32)])
@pytest.mark.parametrize(("begin", "at_once"), [(0, 4), (32, 3), (160, 1)])
def test_each_kv_head_has_its_tokens_where_the_reference_moves_them(
    dtype: torch.dtype,
    head_dim: int,
    begin: int,
    at_once: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of layers that keep as many and fewer, with blocks that overlap those they are moved to."""
    monkeypatch.setattr(gpu_compaction, "_MAX_POSITIONS", at_once * 2 * 140)
    kv_heads, counts = 2, (100, 33, 1, 140)
    generator = torch.Generator().manual_seed(begin)
    kept = {
        layer: torch.stack([torch.randperm(LENGTH, generator=generator)[:count] for _ in range(kv_heads)])
        for layer, count in enumerate(counts)
    }
    prompt = scattered_context([LENGTH], SLOTS).slots[0]
    own = _caches(len(counts), kv_heads, head_dim, dtype)
    on_device = [cache_on(device, LayerCache(cache.keys.clone(), cache.values.clone())) for cache in own]
    wanted = compact(kept, own, prompt, begin)
    in_layers = {layer: positions.to(device) for layer, positions in kept.items()}
    places = Compaction(on_device).move(in_layers, prompt.to(device), begin)
    assert places.keys() == wanted.keys()
    for layer, cache in enumerate(own):
        assert torch.equal(places[layer].cpu(), wanted[layer])
        for ours, theirs in ((on_device[layer].keys, cache.keys), (on_device[layer].values, cache.values)):
            assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))


def test_layers_of_other_layouts_are_refused(device: torch.device) -> None:
    one, other = _caches(1, 2, 64, torch.float32), _caches(1, 2, 32, torch.float32)
    with pytest.raises(ValueError, match="one dtype, shape and layout"):
        Compaction([cache_on(device, cache) for cache in (*one, *other)])
