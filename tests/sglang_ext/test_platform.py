from __future__ import annotations

from importlib.metadata import entry_points
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import platforms
from sglang.srt.server_args import ServerArgs

from sglang_winnow import platform
from sglang_winnow.allocator import TorchPagedAllocator


def unset_arguments(**given: object) -> Any:
    """Return the arguments as they are when SGLang asks the platform; the command line named those ``given``."""
    by_sglang = {"device": "cpu", "dtype": "auto", "attention_backend": "intel_amx"}
    return SimpleNamespace(**(dict.fromkeys(platform.DEFAULTS) | by_sglang | given))


def test_cuda_leaves_the_field_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert platform.activate() is None


def test_sglang_resolves_the_plugin_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    (entry_point,) = entry_points(group="sglang.srt.platforms", name="winnow_cpu")
    assert entry_point.load() is platform.activate
    resolved = platforms._resolve_platform()
    assert type(resolved) is platform.CpuPlatform
    assert resolved.is_out_of_tree()
    assert resolved.get_device(None) == "cpu"
    assert resolved.get_paged_allocator_cls() is TorchPagedAllocator


def test_open_arguments_get_defaults() -> None:
    arguments = unset_arguments()
    platform.CpuPlatform().apply_server_args_defaults(arguments)
    assert vars(arguments) == platform.DEFAULTS | {
        "device": "cpu",
        "sleep_on_idle": True,
        "dtype": "float32",
        "attention_backend": "winnow",
        "disable_hybrid_swa_memory": True,
    }


def test_windows_have_pools_of_their_own_with_other_backends() -> None:
    arguments = unset_arguments(attention_backend="torch_native", disable_hybrid_swa_memory=False)
    platform.CpuPlatform().apply_server_args_defaults(arguments)
    assert not arguments.disable_hybrid_swa_memory


@pytest.mark.parametrize(("name", "value"), [("page_size", 1), ("chunked_prefill_size", -1), ("dtype", "bfloat16")])
def test_the_command_line_wins(name: str, value: object) -> None:
    arguments = unset_arguments(**{name: value})
    platform.CpuPlatform().apply_server_args_defaults(arguments)
    assert getattr(arguments, name) == value


def test_defaults_are_arguments_that_sglang_leaves_open() -> None:
    defaults = {name: parameter.default for name, parameter in signature(ServerArgs).parameters.items()}
    assert {name: defaults[name] for name in platform.DEFAULTS} == dict.fromkeys(platform.DEFAULTS)
    assert defaults["dtype"] == "auto"
