"""The SGLang plugin whose random weights attend to few tokens."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import httpx
import pytest
import torch
from torch import nn

from benchmarks.serving.serve import WINNOW, environment_of
from benchmarks.serving.server_plugins import GAIN_SETTING, PEAKED_ATTENTION
from tests.models import ModelShape, write_model
from tests.runtime import runtime_server

GAIN = 4.0
TOKENS = 2048


@pytest.fixture
def plugin() -> ModuleType:
    name = PEAKED_ATTENTION.name
    spec = importlib.util.spec_from_file_location(name, PEAKED_ATTENTION.folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Attention(nn.Module):
    def __init__(self, hidden: int, q_size: int, kv_size: int) -> None:
        super().__init__()
        self.q_size = q_size
        self.qkv_proj = nn.Linear(hidden, q_size + 2 * kv_size, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 256)
        self.input_layernorm = nn.RMSNorm(256)
        self.self_attn = Attention(256, 128, 64)


def test_logits_have_the_gain_as_their_deviation(plugin: ModuleType) -> None:
    model = Model()
    plugin.sharpen(model, GAIN)
    with torch.no_grad():
        hidden = model.input_layernorm(model.embed_tokens.weight)
        queries, keys, _ = model.self_attn.qkv_proj(hidden).split([128, 64, 64], dim=1)
        logits = queries.view(64, 2, 64).transpose(0, 1) @ keys.T * 64**-0.5
    assert logits.std().item() == pytest.approx(GAIN, rel=0.15)
    assert plugin.GAIN == GAIN_SETTING
    assert PEAKED_ATTENTION.notice == plugin.IN_PLACE


@pytest.mark.full
def test_a_server_with_it_attends_to_few_tokens(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", ModelShape())
    prompt = torch.randint(2, 512, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    policy = json.dumps({"decode": {"policy": "lowbit_top_p"}})
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True, "custom_params": {"attention": policy}},
    }
    environment = environment_of(WINNOW, {"WINNOW_CROSSOVER_TOKENS": "0"}, GAIN)
    arguments = ("--load-format", "dummy", "--attention-backend", "winnow", "--max-total-tokens", "8192")
    with runtime_server(model, *arguments, log=tmp_path / "log", **environment) as runtime:
        answer = httpx.post(f"{runtime.url}/generate", json=body, timeout=120).json()
    PEAKED_ATTENTION.check_log(tmp_path / "log")
    # With SGLang's own random weights it is all of them.
    assert answer["meta_info"]["attention"]["decode"]["attended_ratio"] < 0.4
