"""An SGLang plugin for benchmarks: random weights that attend to few tokens, as trained ones do.

SGLang's own random weights are so small that all tokens weigh the same. With this folder on ``PYTHONPATH`` and a gain
in the environment, a token's embedding is what every layer sees of it, keys are random projections of that, and queries
are the same times the gain: the logits of a query are normally distributed, with the gain as their deviation.
"""

from __future__ import annotations

import logging
import os
from typing import Final

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import nn

GAIN: Final = "PEAKED_ATTENTION_GAIN"
IN_PLACE: Final = "random weights attend to few tokens"

logger = logging.getLogger(__name__)


def register() -> None:
    """Change weights once they are made up; SGLang calls this in each of its processes."""
    HookRegistry.register("sglang.srt.model_loader.loader.initialize_dummy_weights", _sharpen, HookType.AFTER)


def sharpen(model: nn.Module, gain: float) -> None:
    """Give the projections, norms and embeddings before attention weights with which it peaks.

    Args:
        model: of SGLang's, Llama- or Qwen-like.
        gain: standard deviation of a query's logits.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def normal(weight: torch.Tensor, deviation: float) -> None:
        generator = generators.setdefault(weight.device, torch.Generator(weight.device).manual_seed(0))
        weight.normal_(0, deviation, generator=generator)

    for name, module in model.named_modules():
        if name.endswith("embed_tokens"):
            normal(module.weight.data, 1)
        elif name.endswith("input_layernorm"):
            module.weight.data.fill_(1)
        elif hasattr(module, "qkv_proj"):
            projection = module.qkv_proj.weight.data
            normal(projection, projection.shape[1] ** -0.5)
            if hasattr(module, "q_norm"):
                module.q_norm.weight.data.fill_(gain)
                module.k_norm.weight.data.fill_(1)
            else:
                projection[: module.q_size] *= gain


def _sharpen(_nothing: None, model: nn.Module, *_: object, **__: object) -> None:
    sharpen(model, float(os.environ[GAIN]))
    logger.warning(IN_PLACE)
