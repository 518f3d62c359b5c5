"""What of a model the attention backend cannot serve, found out at start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool

from sglang_winnow.backend_name import NAME
from sglang_winnow.dense_backend import DENSE_ENVIRONMENT, WITH_CAPS_AND_SINKS, WITH_WINDOWS, dense_backend
from sglang_winnow.forward_pass import window_of
from sglang_winnow.served_policies import served_policies
from sglang_winnow.server_information import sliding_layers
from sglang_winnow.sglang_versions.arguments import resolved, verifies_drafts
from sglang_winnow.sglang_versions.releases import CAPS_AND_SINKS_ON_CUDA, OLDEST, WINDOWS_ON_CUDA
from sglang_winnow.softmaxes import has_sinks, sink_logits_of
from winnow_kernels.attend.gpu import LARGEST_GROUP
from winnow_kernels.cache import NARROW
from winnow_kernels.policies.declarations import DECLARATIONS
from winnow_kernels.policies.registry import POLICIES_SETTING
from winnow_kernels.selection.gpu_pages import MAX_PAGES

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner import ModelRunner

PAGE_SIZES_ON_CUDA = (16, 32, 64)
# SGLang's name for attention that is bidirectional among the tokens of an image, which these models do not have. Other
# models are bidirectional in the whole prompt under the same name.
CAUSAL_IN_FACT = frozenset({"Gemma3ForCausalLM"})
# Later releases call the attention of these causal, too, and leave it to the backend to look for images.
WITH_IMAGES = frozenset({"Gemma3ForConditionalGeneration"})
KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCALES_OF_A_FILE: Final = (
    "scales for a KV cache in 8 bits that are in a file of their own (--quantization-param-path), not in the checkpoint"
)


def refuse_what_is_not_served(runner: ModelRunner) -> None:
    """Raise SystemExit with one sentence that names what is not served."""
    for reason in _reasons(runner):
        raise SystemExit(refusal(reason))


def refusal(reason: str) -> str:
    """Return the sentence that says what is not served."""
    return f"Winnow: the server does not start, because --attention-backend {NAME} does not serve {reason}."


def attention_layers(owner: ModelRunner | KVCacheConfigurator) -> list[RadixAttention]:
    """Return the attention layers of the model that ``owner`` has, first layer first."""
    layers = [module for module in owner.model.modules() if isinstance(module, RadixAttention)]
    return sorted(layers, key=lambda layer: layer.layer_id)


def _reasons(runner: ModelRunner) -> Iterator[str]:
    yield from _reasons_in_model(runner)
    if torch.cuda.is_available():
        yield from _reasons_on_cuda(runner)
    yield from _reasons_of_indexes(runner)
    pool, layers = runner.token_to_kv_pool, attention_layers(runner)
    if isinstance(pool, HybridLinearKVPool):
        if pool.full_attention_layer_id_mapping.keys() != {layer.layer_id for layer in layers}:
            yield "models that do not say which of their layers have full attention"
        pool = pool.full_kv_pool
    if type(pool) is not MHATokenToKVPool:
        yield f"a KV cache of the kind {type(pool).__name__}"
    elif pool.dtype not in (*KV_DTYPES, *NARROW):
        yield f"a KV cache in {_name(pool.dtype)} (use float32, float16, bfloat16 or float8_e4m3fn)"
    # SGLang divides by them when it writes the cache, but attention multiplies by those of a checkpoint alone.
    if pool.dtype in NARROW and any(layer.k_scale is not None and layer.k_scale_float is None for layer in layers):
        yield SCALES_OF_A_FILE


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reasons_in_model(runner: ModelRunner) -> Iterator[str]:
    config = runner.model_config
    if config.attention_arch != AttentionArch.MHA:
        yield "multi-head latent attention (MLA)"
    if config.is_encoder_decoder:
        yield "encoder-decoder models"
    if not config.is_generation:
        yield "models that do not generate"
    if _has_sinks(runner) and not has_sinks(config):
        yield f"sink logits of other models than gpt-oss ({', '.join(config.hf_config.architectures)})"
    if with_images := WITH_IMAGES.intersection(config.hf_config.architectures):
        yield f"attention that is not causal among the tokens of an image ({', '.join(with_images)})"
    layers = attention_layers(runner)
    if len({layer.scaling for layer in layers}) != 1:
        yield "layers that scale their scores differently"
    for layer in layers:
        if not _is_causal(layer, config) or layer.is_cross_attention:
            yield "attention that is not causal self-attention"
        if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
            yield f"attention scores that are capped by {layer.logit_capping_method}, not tanh"
        if layer.qk_head_dim != layer.v_head_dim:
            yield "keys and values of different sizes"
        if layer.use_irope or layer.xai_temperature_len > 0:
            yield "attention whose temperature depends on the position"


def _has_sinks(runner: ModelRunner) -> bool:
    return any(name.endswith(("sinks", "attention_sink_bias")) for name, _ in runner.model.named_parameters())


def _is_causal(layer: RadixAttention, config: ModelConfig) -> bool:
    if layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL:
        is_text = not CAUSAL_IN_FACT.isdisjoint(config.hf_config.architectures)
        return is_text and not getattr(config.hf_config, "use_bidirectional_attention", False)
    return layer.attn_type == AttentionType.DECODER


def _reasons_on_cuda(runner: ModelRunner) -> Iterator[str]:
    if runner.page_size not in PAGE_SIZES_ON_CUDA:
        yield f"pages of {runner.page_size} tokens on CUDA (use --page-size 16, 32 or 64)"
    if runner.model_config.context_len > MAX_PAGES * runner.page_size:
        yield f"contexts of {runner.model_config.context_len} tokens in pages of {runner.page_size} (use larger pages)"
    for name in served_policies(verifies=verifies_drafts(resolved(runner.server_args))):
        longest = DECLARATIONS[name].longest_on_gpu
        if longest is not None and runner.model_config.context_len > longest:
            yield f"contexts of more than {longest} tokens with {name} (leave it out of {POLICIES_SETTING})"
    layers = attention_layers(runner)
    yield from _reasons_of_softmaxes(runner, layers)
    windows = {layer.layer_id: window for layer in layers if (window := window_of(layer)) is not None}
    if windows:
        yield from _reasons_of_windows(runner, windows, len(layers))
    for layer in layers:
        if layer.tp_q_head_num > LARGEST_GROUP * layer.tp_k_head_num:
            yield f"more than {LARGEST_GROUP} query heads for a KV head on CUDA"


def _reasons_of_windows(runner: ModelRunner, windows: Mapping[int, int], layers: int) -> Iterator[str]:
    if not WINDOWS_ON_CUDA:
        yield f"sliding windows on CUDA with this SGLang (use {OLDEST})"
    if len(windows) == layers:
        yield "models of which every layer has a sliding window, on CUDA"
    if windows.keys() != sliding_layers(runner.model_config):
        yield "models that do not say which of their layers have a sliding window, on CUDA"
    # Some dense backends know one window.
    if set(windows.values()) != {runner.sliding_window_size}:
        yield "layers whose sliding windows are not as long as the model's, on CUDA"
    yield from _reasons_of_dense_backend(runner, "sliding windows", WITH_WINDOWS)


def _reasons_of_softmaxes(runner: ModelRunner, layers: Sequence[RadixAttention]) -> Iterator[str]:
    caps, numbers = {layer.logit_cap for layer in layers}, {layer.layer_id for layer in layers}
    found = {"soft caps (logit_cap)": any(cap > 0 for cap in caps), "sink logits": _has_sinks(runner)}
    for name in (name for name, is_found in found.items() if is_found):
        if not CAPS_AND_SINKS_ON_CUDA:
            yield f"{name} on CUDA with this SGLang (use {OLDEST})"
        yield from _reasons_of_dense_backend(runner, name, WITH_CAPS_AND_SINKS)
    # What kernels are compiled for, and which there are, is decided for all layers at once.
    if len(caps) > 1:
        yield "layers whose soft caps (logit_cap) differ, on CUDA"
    if _has_sinks(runner) and sink_logits_of(runner.model).keys() != numbers:
        yield "models that do not have a layer's sink logits beside its attention, on CUDA"


def _reasons_of_dense_backend(runner: ModelRunner, name: str, served: Sequence[str]) -> Iterator[str]:
    if (dense := dense_backend(runner)) not in served:
        yield f"{name} beside the dense backend {dense} (set {DENSE_ENVIRONMENT} to {' or '.join(served)})"


def _reasons_of_indexes(runner: ModelRunner) -> Iterator[str]:
    head_dim = attention_layers(runner)[0].qk_head_dim
    for name in served_policies(verifies=verifies_drafts(resolved(runner.server_args))):
        index = DECLARATIONS[name].index
        if index is not None and (unfit := index.unfit(head_dim, runner.page_size)) is not None:
            yield f"{unfit} with {name} (leave it out of {POLICIES_SETTING})"
