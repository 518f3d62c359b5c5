"""What SGLang decides of a server's arguments by the model, with the attention backend ``winnow`` and with others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_winnow import linear_attention, model_arguments
from sglang_winnow.sglang_versions.hook_targets import target
from tests.models import Family, ModelShape, write_model

# Says how SGLang resolves the arguments of each model's folder, or why it does not start.
ARGUMENTS = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
from sglang_winnow.sglang_versions.arguments import attention_backends, resolved
said = {}
for folder in sys.argv[1:]:
    for backend in ("winnow", "torch_native"):
        try:
            arguments = prepare_server_args(["--model-path", folder, "--attention-backend", backend])
            # From 0.5.19 on what the command line leaves open is decided later.
            getattr(arguments, "resolve_once", lambda: None)()
            of = {"backends": attention_backends(arguments), "one_pool": resolved(arguments).disable_hybrid_swa_memory}
        except (SystemExit, AssertionError) as refusal:
            of = {"refusal": str(refusal)}
        said.setdefault(folder, {})[backend] = of
print("SAID", json.dumps(said))
"""
FAMILIES: tuple[Family, ...] = ("llama", "gemma2", "gpt_oss", "qwen3_next")
ADJUST: Any = {hook.target: hook.function for hook in model_arguments.HOOKS}[target("adjust arguments to the model")]
SERVED = {"backends": ["winnow", "winnow"], "one_pool": True}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By family and backend."""
    folder = tmp_path_factory.mktemp("families")
    models = {family: write_model(folder / family, ModelShape(family=family, kv_heads=2)) for family in FAMILIES}
    command = [sys.executable, "-c", ARGUMENTS, *map(str, models.values())]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (line,) = [line for line in output.splitlines() if line.startswith("SAID ")]
    of_folders = json.loads(line.removeprefix("SAID "))
    return {family: of_folders[str(Path(model))] for family, model in models.items()}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_models_with_windows_caps_and_sinks_are_taken_with_one_pool(said: dict[str, Any], family: str) -> None:
    assert said[family]["winnow"] == SERVED


def test_on_a_cpu_models_with_linear_attention_are_refused_before_sglang_says_what_their_radix_cache_needs(
    said: dict[str, Any],
) -> None:
    assert said["qwen3_next"]["winnow"]["refusal"] == (
        "Winnow: the server does not start, because --attention-backend winnow does not serve models with linear"
        " attention on a CPU: SGLang itself cannot run these layers there."
    )


@pytest.mark.parametrize(("on_cuda", "runner"), [(True, "auto"), (False, "triton")])
def test_sglang_lays_out_the_experts_of_models_with_sinks_on_cuda(
    on_cuda: bool, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SimpleNamespace(hf_config=SimpleNamespace(architectures=["GptOssForCausalLM"]))
    arguments = SimpleNamespace(model_path="./FOLDER", moe_runner_backend="auto")
    adjusted: list[Any] = []
    monkeypatch.setattr(model_arguments, "is_chosen", lambda _: True)
    monkeypatch.setattr(model_arguments, "model_config_of", lambda _: model)
    monkeypatch.setattr(model_arguments, "resolved", lambda own: own)
    monkeypatch.setattr(model_arguments, "decide", lambda own, **decided: own.__dict__.update(decided))
    monkeypatch.setattr(linear_attention, "has_linear_attention", lambda _: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_cuda)
    ADJUST(adjusted.append, arguments)
    assert [own.moe_runner_backend for own in adjusted] == [runner]


def test_other_backends_are_as_sglang_leaves_them(said: dict[str, Any]) -> None:
    assert said["llama"]["torch_native"] == {"backends": ["torch_native", "torch_native"], "one_pool": False}
    assert "GptOssForCausalLM requires one of" in said["gpt_oss"]["torch_native"]["refusal"]
    assert "Winnow" not in said["qwen3_next"]["torch_native"].get("refusal", "")
