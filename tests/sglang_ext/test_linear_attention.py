"""Models with linear attention: which are served on CUDA, and what SGLang then decides of their radix cache."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import server_args as sglang_arguments
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs
from torch import nn

from sglang_winnow import linear_attention, model_arguments, radix
from sglang_winnow.backend_name import NAME
from sglang_winnow.linear_attention import reasons
from sglang_winnow.own_backend import own_backend
from sglang_winnow.refusals import refuse_what_is_not_served
from sglang_winnow.server_information import linear_layers, served_model
from sglang_winnow.sglang_versions.hook_targets import target
from tests.models import LINEAR_ATTENTION, ModelShape, write_model
from tests.sglang_ext.test_refusals import SENTENCE, assert_refused, layer, pool, runner

ADJUST: Any = {hook.target: hook.function for hook in model_arguments.HOOKS}[target("adjust arguments to the model")]


@pytest.fixture(scope="module", params=LINEAR_ATTENTION)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("linear"), ModelShape(family=request.param, layers=4, kv_heads=2))


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU, as far as anyone asks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(sglang_arguments, "is_cuda", lambda: True)


def arguments_of(model: Path, **changes: Any) -> Any:
    """SGLang's, before it has looked at the model."""
    arguments = ServerArgs(model_path="dummy")
    for name, value in {"model_path": str(model), "attention_backend": NAME, "page_size": None, **changes}.items():
        setattr(arguments, name, value)
    return arguments


def adjusted(arguments: Any) -> Any:
    """Return ``arguments`` as SGLang adjusts them to the model."""
    ADJUST(ServerArgs._handle_model_specific_adjustments, arguments)
    return arguments


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("changes", "page_size"),
    [({}, 16), ({"page_size": 1}, 16), ({"page_size": 64}, 64), ({"disable_overlap_schedule": True}, 16)],
)
def test_sglang_keeps_copies_of_states_for_pages_of_any_size(
    model: Path, changes: dict[str, Any], page_size: int
) -> None:
    arguments = adjusted(arguments_of(model, **changes))
    assert resolved_view(arguments).uses_mamba_radix_cache
    assert arguments.enable_mamba_extra_buffer()
    assert not arguments.enable_mamba_extra_buffer_lazy()
    assert arguments.page_size == page_size
    assert arguments.mamba_cache_chunk_size == 64
    assert arguments.disable_overlap_schedule == changes.get("disable_overlap_schedule", False)


@pytest.mark.usefixtures("on_cuda")
def test_without_a_radix_cache_sglang_keeps_no_copies(model: Path) -> None:
    arguments = adjusted(arguments_of(model, disable_radix_cache=True, linear_attn_backend="flashinfer"))
    assert not arguments.enable_mamba_extra_buffer()
    assert arguments.page_size == 16


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"speculative_algorithm": "WINNOW"},
            "--speculative-algorithm WINNOW with linear attention: states cannot go back to before a draft",
        ),
        (
            {"mamba_radix_cache_strategy": "no_buffer"},
            "--mamba-radix-cache-strategy no_buffer (use extra_buffer)",
        ),
        (
            {"mamba_radix_cache_strategy": "extra_buffer_lazy"},
            "--mamba-radix-cache-strategy extra_buffer_lazy (use extra_buffer)",
        ),
        (
            {"linear_attn_backend": "flashinfer"},
            "--linear-attn-backend flashinfer beside a radix cache (use triton, or --disable-radix-cache)",
        ),
    ],
)
def test_an_argument_that_is_not_served_is_refused(model: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(SystemExit) as refusal:
        adjusted(arguments_of(model, **changes))
    assert refusal.value.code == SENTENCE.format(reason)


def config_of(*architectures: str) -> Any:
    return SimpleNamespace(hf_config=SimpleNamespace(architectures=list(architectures)))


@pytest.mark.usefixtures("on_cuda")
def test_models_and_devices_that_are_not_served(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(model)
    for served in sorted(linear_attention.SERVED):
        assert list(reasons(arguments, config_of(served))) == []
    other = "linear attention of other models than Qwen3-Next and Qwen3.5 (NemotronHForCausalLM)"
    assert list(reasons(arguments, config_of("NemotronHForCausalLM"))) == [other]
    qwen = config_of("Qwen3NextForCausalLM")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert list(reasons(arguments, qwen)) == [
        "linear attention on Blackwell GPUs, where SGLang takes its own backends alone"
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(linear_attention, "LINEAR_ATTENTION_ON_CUDA", False)
    assert list(reasons(arguments, qwen)) == ["linear attention on CUDA with this SGLang (use 0.5.16)"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(reasons(arguments, qwen)) == [linear_attention.ON_CPU]


def test_the_server_tells_which_layers_have_linear_attention(model: Path) -> None:
    config = ModelConfig(str(model))
    assert linear_layers(config) == {0, 2}
    served = served_model(arguments_of(model), config)
    assert (served.layers, served.linear_layers, served.sliding_layers) == (4, frozenset({0, 2}), frozenset())
    assert served.describe()["linear_layers"] == [0, 2]


def linear_pool(*layers: int, kind: type[Any] = MHATokenToKVPool, dtype: torch.dtype = torch.bfloat16) -> Any:
    own = pool(HybridLinearKVPool, dtype)
    own.full_kv_pool = pool(kind, dtype)
    own.full_attention_layer_id_mapping = {number: place for place, number in enumerate(layers)}
    return own


def test_the_pool_of_the_layers_with_full_attention_is_looked_at() -> None:
    layers: tuple[nn.Module, ...] = (layer(1), layer(3))
    refuse_what_is_not_served(runner(*layers, cache=linear_pool(1, 3)))
    refuse_what_is_not_served(runner(*layers, cache=linear_pool(1, 3, dtype=torch.float8_e4m3fn)))
    packed = type("Packed", (MHATokenToKVPool,), {})
    assert_refused(runner(*layers, cache=linear_pool(1, 3, kind=packed)), "a KV cache of the kind Packed")
    assert_refused(
        runner(*layers, cache=linear_pool(0, 1)), "models that do not say which of their layers have full attention"
    )


@pytest.mark.parametrize(
    ("chosen", "has_states", "served"),
    [
        (UnifiedRadixCache, True, True),
        (ChunkCache, True, True),
        (UnifiedRadixCache, False, False),
        (RadixCache, False, True),
    ],
)
def test_the_cache_with_states_is_served_where_the_model_has_some(
    chosen: type[Any], has_states: bool, served: bool
) -> None:
    arguments = SimpleNamespace(prefill_attention_backend=None, decode_attention_backend=None, attention_backend=NAME)
    context: Any = SimpleNamespace(server_args=arguments, is_hybrid_ssm=has_states)
    cache = object.__new__(chosen)
    if served:
        radix.require_served_cache(cache, context)
        return
    with pytest.raises(SystemExit, match="does not serve the prefix cache UnifiedRadixCache"):
        radix.require_served_cache(cache, context)


def test_the_backend_is_found_inside_of_sglangs_wrapper() -> None:
    own = SimpleNamespace()
    assert own_backend(SimpleNamespace(attn_backend=own)) is own
    wrapper = SimpleNamespace(full_attn_backend=own, linear_attn_backend=object())
    assert own_backend(SimpleNamespace(attn_backend=wrapper)) is own
