"""What a model changes of attention's softmax (``winnow_kernels.softmax``), as SGLang has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor, nn

from winnow_kernels.cache import LayerCache
from winnow_kernels.softmax import Softmax

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

WITH_SINKS: Final = frozenset({"GptOssForCausalLM"})
"""Models whose query heads each have a sink logit, which SGLang hands to the backend."""


def has_sinks(config: ModelConfig) -> bool:
    """Return whether the model is one of ``WITH_SINKS``."""
    return not WITH_SINKS.isdisjoint(config.hf_config.architectures)


def sink_logits_of(model: nn.Module) -> dict[int, Tensor]:
    """Return the sink logits, [query heads] of this rank, of each layer that has some, by SGLang's number.

    They are the very parameters that SGLang hands to the backend with each call, and lie beside the layer's attention
    in the same module. Where they are looked for at a server's start, CUDA graphs depend on no call.
    """
    return {
        layer.layer_id: sinks
        for module in model.modules()
        if isinstance(sinks := getattr(module, "sinks", None), Tensor)
        for layer in module.children()
        if isinstance(layer, RadixAttention)
    }


def layer_cache(pool: Any, layer: RadixAttention, sink_logits: Tensor | None = None) -> LayerCache:
    """Return the KV cache of ``layer`` in SGLang's ``pool``, with the layer's softmax."""
    cap = layer.logit_cap if layer.logit_cap > 0 else None
    return LayerCache(*pool.get_kv_buffer(layer.layer_id), softmax=Softmax(cap, sink_logits))
