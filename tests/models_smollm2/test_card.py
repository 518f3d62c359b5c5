"""What ships with the card: the adapter, and the tables of its evaluation."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from smollm2_training.card import tables
from smollm2_training.network import PROJECTIONS
from winnow_evaluation.model_card import updated

FOLDER = Path(__file__).parents[2] / "models" / "smollm2-32k"
LAYERS, RANK, MIB = 30, 48, 2**20


def test_the_card_shows_the_evaluation() -> None:
    card = (FOLDER / "README.md").read_text()
    assert updated(card, tables(FOLDER)) == card


def test_the_adapter_is_whole_and_small() -> None:
    shards = sorted(FOLDER.glob("*.safetensors"))
    sizes = [shard.stat().st_size for shard in shards]
    assert max(sizes) <= 16 * MIB
    assert sum(sizes) <= 32 * MIB
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    paths = [
        f"base_model.model.model.layers.{layer}.{path}" for layer in range(LAYERS) for path in PROJECTIONS.values()
    ]
    assert tensors.keys() == {f"{path}.lora_{factor}.weight" for path in paths for factor in "AB"}
    for path in paths:
        a, b = tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"]
        assert a.shape[0] == b.shape[1] == RANK
        assert a.isfinite().all()
        assert b.isfinite().all()
        assert b.any()
