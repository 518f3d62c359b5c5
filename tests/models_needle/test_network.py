"""The network against transformers' Llama, which reads what it exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from needle_training.network import Network, Shape, export

SHAPE = Shape(vocabulary=97, hidden=64, layers=3, heads=8, kv_heads=2, head_dim=16, intermediate=112)


@pytest.fixture
def network() -> Network:
    """A float32 network whose weights bfloat16 holds exactly, large enough that every part of it matters."""
    torch.manual_seed(0)
    network = Network(SHAPE, torch.float32)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight.copy_(torch.rand_like(weight) + 0.5 if name.endswith("norm") else torch.randn_like(weight) * 0.15)
            weight.copy_(weight.bfloat16())
    return network


@pytest.mark.usefixtures("eager")
def test_it_computes_what_llama_computes(network: Network, tmp_path: Path) -> None:
    export(network, tmp_path)
    llama = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(SHAPE.vocabulary, (2, 300), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours = network.logits(network(tokens)).view(2, 300, -1)
        theirs = llama(tokens).logits
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("eager")
def test_a_token_does_not_see_those_after_it(network: Network) -> None:
    tokens = torch.arange(40)[None]
    changed = tokens.clone()
    changed[0, 25:] = 7
    with torch.inference_mode():
        one, other = network(tokens), network(changed)
    torch.testing.assert_close(one[:25], other[:25])
    assert not torch.allclose(one[25:], other[25:], atol=1e-2)


def test_an_export_replaces_the_one_before(network: Network, tmp_path: Path) -> None:
    for stale in (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ):
        (tmp_path / stale).write_text("stale")
    (tmp_path / "tokenizer.json").write_text("{}")
    export(network, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_the_configuration_that_ships_is_the_one_that_is_exported(folder: Path, tmp_path: Path) -> None:
    export(Network(Shape()), tmp_path)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((folder / name).read_text())
    index = "model.safetensors.index.json"
    assert json.loads((tmp_path / index).read_text()) == json.loads((folder / index).read_text())
