"""What of a model the attention backend does not serve ends the start, with one sentence that names it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from torch import nn

from sglang_winnow import refusals
from sglang_winnow.dense_backend import DENSE_ENVIRONMENT, dense_backend
from sglang_winnow.refusals import attention_layers, refuse_what_is_not_served
from sglang_winnow.sglang_versions.releases import OLDEST
from winnow_kernels.policies.registry import POLICIES_SETTING

SENTENCE = "Winnow: the server does not start, because --attention-backend winnow does not serve {}."

SERVED_MODEL: dict[str, Any] = {
    "attention_arch": AttentionArch.MHA,
    "is_encoder_decoder": False,
    "is_generation": True,
    "context_len": 4096,
    "hf_config": SimpleNamespace(architectures=["LlamaForCausalLM"]),
    "hf_text_config": SimpleNamespace(),
}


GEMMA = {"hf_config": SimpleNamespace(architectures=["Gemma3ForCausalLM"])}
ONE_WINDOW = {"hf_text_config": SimpleNamespace(layer_types=["sliding_attention", "full_attention"])}
GPT_OSS = {"hf_config": SimpleNamespace(architectures=["GptOssForCausalLM"])}
BIDIRECTIONAL = {"attn_type": AttentionType.DECODER_BIDIRECTIONAL}


def layer(number: int, **changes: Any) -> RadixAttention:
    return RadixAttention(
        **{"num_heads": 4, "head_dim": 64, "scaling": 0.125, "num_kv_heads": 2, "layer_id": number} | changes
    )


def with_sinks(name: str = "sinks", number: int = 0) -> nn.Module:
    attention = nn.ModuleDict({"attn": layer(number)})
    attention.register_parameter(name, nn.Parameter(torch.zeros(4)))
    return attention


def pool(kind: type[object] = MHATokenToKVPool, dtype: torch.dtype = torch.float32) -> Any:
    made: Any = object.__new__(kind)
    made.dtype = dtype
    return made


def runner(
    *layers: nn.Module,
    config: dict[str, Any] | None = None,
    cache: Any = None,
    page_size: int = 16,
    window: int | None = None,
) -> Any:
    """Return what stands for a runner that is served, but for what the arguments say."""
    return SimpleNamespace(
        model=nn.ModuleList(layers or [layer(0), layer(1)]),
        sliding_window_size=window,
        model_config=SimpleNamespace(**SERVED_MODEL | (config or {})),
        token_to_kv_pool=cache or pool(),
        page_size=page_size,
        server_args=SimpleNamespace(speculative_algorithm=None),
    )


WINDOWED = runner(layer(0, sliding_window_size=128), layer(1), config=ONE_WINDOW, window=128)


def assert_refused(refused: Any, reason: str) -> None:
    with pytest.raises(SystemExit) as refusal:
        refuse_what_is_not_served(refused)
    assert refusal.value.code == SENTENCE.format(reason)


@pytest.mark.parametrize(
    "served",
    [
        runner(),
        runner(layer(0, sliding_window_size=128), layer(1)),
        runner(layer(0, **BIDIRECTIONAL, sliding_window_size=128), layer(1, **BIDIRECTIONAL), config=GEMMA),
        runner(layer(0), layer(1, logit_cap=50.0)),
        runner(with_sinks(), with_sinks(number=1), config=GPT_OSS),
        runner(cache=pool(dtype=torch.bfloat16)),
        runner(cache=pool(dtype=torch.float16)),
        runner(cache=pool(dtype=torch.float8_e4m3fn)),
    ],
)
def test_what_is_served_is_not_refused(served: Any) -> None:
    refuse_what_is_not_served(served)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (runner(page_size=1), "pages of 1 tokens on CUDA (use --page-size 16, 32 or 64)"),
        (runner(page_size=128), "pages of 128 tokens on CUDA (use --page-size 16, 32 or 64)"),
        (runner(config={"context_len": 2**20}), f"contexts of {2**20} tokens in pages of 16 (use larger pages)"),
        (
            runner(config={"context_len": 2**18 + 1}, page_size=64),
            f"contexts of more than {2**18} tokens with tactic (leave it out of WINNOW_POLICIES)",
        ),
        (runner(layer(0, num_heads=34)), "more than 16 query heads for a KV head on CUDA"),
    ],
)
def test_on_cuda(refused: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POLICIES_SETTING, "tactic")
    refuse_what_is_not_served(runner())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refuse_what_is_not_served(runner())
    refuse_what_is_not_served(runner(cache=pool(dtype=torch.float8_e4m3fn)))
    assert_refused(refused, reason)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POLICIES_SETTING, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(refusals, "WINDOWS_ON_CUDA", True)
    monkeypatch.setattr(refusals, "CAPS_AND_SINKS_ON_CUDA", True)
    monkeypatch.setenv(DENSE_ENVIRONMENT, "triton")


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (
            runner(layer(0), layer(1, sliding_window_size=128), config=ONE_WINDOW, window=128),
            "models that do not say which of their layers have a sliding window, on CUDA",
        ),
        (
            runner(layer(0, sliding_window_size=128), window=128),
            "models of which every layer has a sliding window, on CUDA",
        ),
        (
            runner(layer(0, sliding_window_size=64), layer(1), config=ONE_WINDOW, window=128),
            "layers whose sliding windows are not as long as the model's, on CUDA",
        ),
        (
            runner(layer(0, sliding_window_size=128), layer(1), config=ONE_WINDOW),
            "layers whose sliding windows are not as long as the model's, on CUDA",
        ),
    ],
)
@pytest.mark.usefixtures("on_cuda")
def test_windows_on_cuda(refused: Any, reason: str) -> None:
    refuse_what_is_not_served(WINDOWED)
    assert_refused(refused, reason)


@pytest.mark.parametrize("dense", ["flashinfer", "trtllm_mha"])
@pytest.mark.usefixtures("on_cuda")
def test_windows_beside_a_backend_that_sees_beyond_them(dense: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DENSE_ENVIRONMENT, dense)
    assert_refused(
        WINDOWED, f"sliding windows beside the dense backend {dense} (set WINNOW_DENSE_BACKEND to fa3 or triton)"
    )


@pytest.mark.usefixtures("on_cuda")
def test_windows_with_a_release_that_has_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "WINDOWS_ON_CUDA", False)
    assert_refused(WINDOWED, f"sliding windows on CUDA with this SGLang (use {OLDEST})")


CAPPED = runner(layer(0, logit_cap=50.0), layer(1, logit_cap=50.0))
WITH_SINKS = runner(with_sinks(), with_sinks(number=1), config=GPT_OSS)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (runner(layer(0), layer(1, logit_cap=50.0)), "layers whose soft caps (logit_cap) differ, on CUDA"),
        (
            runner(with_sinks(), layer(1), config=GPT_OSS),
            "models that do not have a layer's sink logits beside its attention, on CUDA",
        ),
    ],
)
@pytest.mark.usefixtures("on_cuda")
def test_caps_and_sinks_on_cuda(refused: Any, reason: str) -> None:
    refuse_what_is_not_served(CAPPED)
    refuse_what_is_not_served(WITH_SINKS)
    assert_refused(refused, reason)


@pytest.mark.parametrize(("refused", "name"), [(CAPPED, "soft caps (logit_cap)"), (WITH_SINKS, "sink logits")])
@pytest.mark.usefixtures("on_cuda")
def test_caps_and_sinks_beside_a_backend_that_knows_none(
    refused: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DENSE_ENVIRONMENT, "flashinfer")
    refuse_what_is_not_served(runner())
    assert_refused(refused, f"{name} beside the dense backend flashinfer (set WINNOW_DENSE_BACKEND to fa3 or triton)")


@pytest.mark.parametrize(("refused", "name"), [(CAPPED, "soft caps (logit_cap)"), (WITH_SINKS, "sink logits")])
@pytest.mark.usefixtures("on_cuda")
def test_caps_and_sinks_with_a_release_that_has_not_run(
    refused: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "CAPS_AND_SINKS_ON_CUDA", False)
    assert_refused(refused, f"{name} on CUDA with this SGLang (use {OLDEST})")


@pytest.mark.parametrize(("major", "chosen"), [(9, "fa3"), (8, "triton"), (10, "triton")])
def test_the_dense_backend_of_a_model_with_sinks_is_sglangs_choice(
    major: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DENSE_ENVIRONMENT, raising=False)
    assert dense_backend(WITH_SINKS) == "triton"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    assert dense_backend(WITH_SINKS) == chosen


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (runner(page_size=8), "pages of 8 tokens with quoka (leave it out of WINNOW_POLICIES)"),
        (runner(page_size=48), "pages of 48 tokens with tactic (leave it out of WINNOW_POLICIES)"),
        (runner(layer(0, head_dim=100)), "heads of 100 numbers with quoka (leave it out of WINNOW_POLICIES)"),
    ],
)
def test_indexes(refused: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POLICIES_SETTING, raising=False)
    assert_refused(refused, reason)
    monkeypatch.setenv(POLICIES_SETTING, "quest,sparq")
    refuse_what_is_not_served(refused)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"attention_arch": AttentionArch.MLA}, "multi-head latent attention (MLA)"),
        ({"is_encoder_decoder": True}, "encoder-decoder models"),
        ({"is_generation": False}, "models that do not generate"),
    ],
)
def test_models(config: dict[str, Any], reason: str) -> None:
    assert_refused(runner(config=config), reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scaling": 0.25}, "layers that scale their scores differently"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention that is not causal self-attention"),
        ({"is_cross_attention": True}, "attention that is not causal self-attention"),
        ({"logit_cap": 30.0, "logit_capping_method": "mlp"}, "attention scores that are capped by mlp, not tanh"),
        ({"v_head_dim": 32}, "keys and values of different sizes"),
        ({"use_irope": True}, "attention whose temperature depends on the position"),
    ],
)
def test_one_layer_that_is_not_served(changes: dict[str, Any], reason: str) -> None:
    assert_refused(runner(layer(0), layer(1, **changes)), reason)


@pytest.mark.parametrize("attention", list(AttentionType))
def test_models_with_images(attention: AttentionType) -> None:
    with_images = {"hf_config": SimpleNamespace(architectures=["Gemma3ForConditionalGeneration"])}
    reason = "attention that is not causal among the tokens of an image (Gemma3ForConditionalGeneration)"
    assert_refused(runner(layer(0, attn_type=attention), config=with_images), reason)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["HrmTextForCausalLM"]},
        {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
    ],
)
def test_prompts_that_see_what_follows(config: dict[str, Any]) -> None:
    model = runner(layer(0, **BIDIRECTIONAL), config={"hf_config": SimpleNamespace(**config)})
    assert_refused(model, "attention that is not causal self-attention")


def test_a_temperature_of_long_contexts() -> None:
    grok = layer(1)
    grok.xai_temperature_len = 1024
    assert_refused(runner(layer(0), grok), "attention whose temperature depends on the position")


@pytest.mark.parametrize("name", ["sinks", "attention_sink_bias"])
def test_sinks_of_other_models(name: str) -> None:
    refused = runner(layer(1), with_sinks(name))
    assert_refused(refused, "sink logits of other models than gpt-oss (LlamaForCausalLM)")


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (pool(MLATokenToKVPool), "a KV cache of the kind MLATokenToKVPool"),
        (pool(type("Packed", (MHATokenToKVPool,), {})), "a KV cache of the kind Packed"),
        (
            pool(dtype=torch.float8_e5m2),
            "a KV cache in float8_e5m2 (use float32, float16, bfloat16 or float8_e4m3fn)",
        ),
    ],
)
def test_caches(cache: Any, reason: str) -> None:
    assert_refused(runner(cache=cache), reason)


def test_scales_of_a_file() -> None:
    scaled = layer(1)
    # As SGLang's models set them from such a file.
    scaled.k_scale = scaled.v_scale = 0.5
    refuse_what_is_not_served(runner(layer(0), scaled))
    assert_refused(
        runner(layer(0), scaled, cache=pool(dtype=torch.float8_e4m3fn)),
        "scales for a KV cache in 8 bits that are in a file of their own (--quantization-param-path), not in the"
        " checkpoint",
    )
    scaled.k_scale_float = scaled.v_scale_float = 0.5
    refuse_what_is_not_served(runner(layer(0), scaled, cache=pool(dtype=torch.float8_e4m3fn)))


def test_layers_come_in_the_order_of_the_model() -> None:
    layers = attention_layers(runner(layer(1), nn.Linear(2, 2), layer(0)))
    assert [one.layer_id for one in layers] == [0, 1]
