"""Caps and sink logits of a model's layers, found without a call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

from sglang_winnow.softmaxes import has_sinks, layer_cache, sink_logits_of


def layer(number: int, cap: float = 0.0) -> RadixAttention:
    return RadixAttention(4, 64, 0.125, 2, layer_id=number, logit_cap=cap)


def attention(number: int, sinks: bool) -> nn.Module:
    """As SGLang's gpt-oss has it."""
    module = nn.ModuleDict({"qkv_proj": nn.Linear(4, 4), "attn": layer(number)})
    if sinks:
        module.register_parameter("sinks", nn.Parameter(torch.arange(4).bfloat16(), requires_grad=False))
    return module


def test_sink_logits_are_the_models_own_parameters() -> None:
    model = nn.ModuleList([attention(3, sinks=True), attention(4, sinks=False), attention(5, sinks=True)])
    found = sink_logits_of(model)
    assert set(found) == {3, 5}
    for sinks, module in zip(found.values(), (model[0], model[2]), strict=True):
        assert sinks is module.sinks


@pytest.mark.parametrize(("cap", "bound"), [(0.0, None), (50.0, 50.0)])
def test_a_layers_cache_has_its_softmax(cap: float, bound: float | None) -> None:
    keys, values, sinks = torch.zeros(2, 16, 2, 64), torch.ones(2, 16, 2, 64), torch.zeros(4)
    pool: Any = SimpleNamespace(get_kv_buffer=lambda number: (keys[number], values[number]))
    cache = layer_cache(pool, layer(1, cap), sinks)
    assert torch.equal(cache.values, values[1])
    assert cache.softmax.cap == bound
    assert cache.softmax.sink_logits is sinks
    assert layer_cache(pool, layer(0)).softmax.is_plain


@pytest.mark.parametrize(("architecture", "has"), [("GptOssForCausalLM", True), ("Gemma2ForCausalLM", False)])
def test_models_with_sinks(architecture: str, has: bool) -> None:
    config: Any = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    assert has_sinks(config) == has
