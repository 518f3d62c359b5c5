"""The adapter: what it merges to, and what it is as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from smollm2_training import adapter as adapter_module
from smollm2_training.adapter import Adapter, read_adapter
from smollm2_training.network import PROJECTIONS, Weights


def _trained(weights: Weights) -> Adapter:
    adapter = Adapter(weights, rank=4, alpha=8, rope_base=1e6)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for b in adapter.b.values():
            b.copy_(torch.randn(b.shape, generator=generator).to(torch.bfloat16))
        for a in adapter.a.values():
            a.copy_(a.to(torch.bfloat16))
    return adapter


def test_a_new_adapter_changes_nothing(weights: Weights) -> None:
    merged = Adapter(weights, rank=4, alpha=8, rope_base=1e6).merged()
    assert all(torch.equal(merged.projections[name], weights.projections[name]) for name in PROJECTIONS)


def test_files_merge_to_what_was_trained(weights: Weights, tmp_path: Path) -> None:
    half = weights._replace(projections={n: w.to(torch.bfloat16) for n, w in weights.projections.items()})
    adapter = _trained(half)
    adapter.save(tmp_path)
    tensors = {name: t for file in tmp_path.glob("adapter-*.safetensors") for name, t in load_file(file).items()}
    configuration = json.loads((tmp_path / "adapter_config.json").read_text())
    scale = configuration["lora_alpha"] / configuration["r"]
    merged = adapter.merged()
    for name, path in PROJECTIONS.items():
        for layer in range(half.attention_norm.shape[0]):
            prefix = f"base_model.model.model.layers.{layer}.{path}"
            a, b = tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"]
            assert a.dtype == b.dtype == torch.bfloat16
            expected = half.projections[name][layer].float() + scale * (b.float() @ a.float())
            torch.testing.assert_close(merged.projections[name][layer], expected.to(torch.bfloat16), atol=0, rtol=2**-7)
    assert len(tensors) == 2 * len(PROJECTIONS) * half.attention_norm.shape[0]
    assert json.loads((tmp_path / "model_config.json").read_text()) == {
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
    }


def test_what_is_saved_is_what_is_loaded(weights: Weights, tmp_path: Path) -> None:
    adapter = _trained(weights)
    adapter.save(tmp_path)
    again = read_adapter(tmp_path, weights)
    assert (again.rank, again.alpha, again.rope_base) == (4, 8, 1e6)
    assert all(torch.equal(one, other) for one, other in zip(adapter.parameters(), again.parameters(), strict=True))


def test_shards_keep_the_limit(weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_module, "SHARD_BYTES", 6000)
    adapter = _trained(weights)
    adapter.save(tmp_path)
    files = sorted(tmp_path.glob("adapter-*.safetensors"))
    assert len(files) > 1
    assert all(file.stat().st_size <= 6000 for file in files)
    assert files[-1].name == f"adapter-{len(files):05}-of-{len(files):05}.safetensors"
    monkeypatch.setattr(adapter_module, "SHARD_BYTES", 10**6)
    adapter.save(tmp_path)
    assert [file.name for file in tmp_path.glob("adapter-*.safetensors")] == ["adapter-00001-of-00001.safetensors"]


def test_another_rank_or_a_missing_shard_is_refused(weights: Weights, tmp_path: Path) -> None:
    adapter = _trained(weights)
    adapter.save(tmp_path)
    with pytest.raises(ValueError, match="rank, alpha and rotary base"):
        Adapter(weights, rank=2, alpha=8, rope_base=1e6).load(tmp_path)
    next(tmp_path.glob("adapter-*.safetensors")).unlink()
    with pytest.raises(ValueError, match="0 of 28 tensors"):
        adapter.load(tmp_path)
