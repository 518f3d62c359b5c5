"""Merging a low-rank adapter into the weights of a model folder: W + s · B A (LoRA, arXiv 2106.09685, section 4.1).

An adapter is a folder in PEFT's format: ``adapter_config.json`` and safetensors files with ``lora_A`` [rank, in] and
``lora_B`` [out, rank] of some of the model's linear layers. Beside them ``model_config.json`` may say what else of the
model's configuration the adapter was trained with, and for which weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

ADAPTER_CONFIG: Final = "adapter_config.json"
MODEL_CONFIG: Final = "model_config.json"
_NAME = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")

_Config = TypeVar("_Config", bound=BaseModel)
Report = Callable[[int, int], None]
"""Told how many tensors are done, of how many."""


class AdapterConfig(BaseModel):
    """What of PEFT's configuration decides how an adapter is merged."""

    r: Annotated[int, Field(ge=1)]
    lora_alpha: Annotated[float, Field(gt=0)]
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class ModelChanges(BaseModel):
    """What the merged model has otherwise than its base."""

    model_config = ConfigDict(extra="forbid")

    rope_theta: Annotated[float, Field(gt=0)] | None = None
    max_position_embeddings: Annotated[int, Field(ge=1)] | None = None
    base_sha256: str | None = None


@dataclass(frozen=True)
class Update:
    """The factors of one layer's update: ``a`` [rank, in] and ``b`` [out, rank]."""

    a: Tensor
    b: Tensor

    def merged(self, weight: Tensor, scale: float) -> Tensor:
        """Return ``weight`` [out, in] with the update, computed in float32, in the dtype of ``weight``."""
        return (weight.float() + scale * (self.b.float() @ self.a.float())).to(weight.dtype)


def merge(base: Path, adapter: Path, out: Path, report: Report) -> None:
    """Write the model in folder ``base`` with the adapter in folder ``adapter`` to the folder ``out``.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the adapter is not one, or is not one for this model.
    """
    config = _read(adapter / ADAPTER_CONFIG, AdapterConfig)
    changes = _read(adapter / MODEL_CONFIG, ModelChanges) if (adapter / MODEL_CONFIG).exists() else ModelChanges()
    updates = read_updates(adapter, config.r)
    shards = sorted(base.glob("*.safetensors"))
    if not shards:
        raise ValueError(f"{base} has no weights in safetensors files")
    if changes.base_sha256 is not None and (found := sha256_of(shards)) != changes.base_sha256:
        raise ValueError(f"{adapter} is for other weights than those in {base} (SHA-256 {found})")
    out.mkdir(parents=True, exist_ok=True)
    for file in base.iterdir():
        if file.is_file() and file not in shards:
            shutil.copyfile(file, out / file.name)
    _change_configuration(out, changes)

    merged = set()
    for shard in shards:
        weights = load_file(shard)
        for name in sorted(weights.keys() & updates.keys()):
            weights[name] = _merged(name, weights[name], updates[name], config.scale)
            merged.add(name)
            report(len(merged), len(updates))
        save_file(weights, out / shard.name, metadata={"format": "pt"})
    if missing := updates.keys() - merged:
        raise ValueError(f"{adapter} changes {min(missing)}, which {base} does not have")


def read_updates(adapter: Path, rank: int) -> dict[str, Update]:
    """Return an adapter's updates by the names of the weights that they change.

    Raises:
        ValueError: there are none, a tensor is no part of an update or has another rank, or half of one is missing.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for file in sorted(adapter.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            match = _NAME.fullmatch(name)
            if match is None:
                raise ValueError(f"{file} has the tensor {name}, which is not a part of a low-rank update")
            if tensor.dim() != 2 or tensor.shape[0 if match["part"] == "A" else 1] != rank:
                raise ValueError(f"{file} has {name} as {list(tensor.shape)}, and the rank is {rank}")
            parts.setdefault(f"{match['layer']}.weight", {})[match["part"]] = tensor
    if not parts:
        raise ValueError(f"{adapter} has no safetensors files with low-rank updates")
    for name, both in parts.items():
        if both.keys() != {"A", "B"}:
            raise ValueError(f"{adapter} has only lora_{min(both)} of {name}")
    return {name: Update(both["A"], both["B"]) for name, both in parts.items()}


def sha256_of(files: list[Path]) -> str:
    """Return the SHA-256 of files, one after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
    return digest.hexdigest()


def _merged(name: str, weight: Tensor, update: Update, scale: float) -> Tensor:
    shape = torch.Size((update.b.shape[0], update.a.shape[1]))
    if shape != weight.shape:
        raise ValueError(f"the adapter changes {name} as {list(shape)}, and the model has {list(weight.shape)}")
    return update.merged(weight, scale)


def _change_configuration(folder: Path, changes: ModelChanges) -> None:
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    if changes.rope_theta is not None:
        rope = config.setdefault("rope_parameters", {"rope_type": "default"})
        rope["rope_theta"] = changes.rope_theta
    if changes.max_position_embeddings is not None:
        config["max_position_embeddings"] = changes.max_position_embeddings
        _change(folder / "tokenizer_config.json", {"model_max_length": changes.max_position_embeddings})
    _change(path, config)


def _change(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields, indent=2) + "\n")


def _read(path: Path, kind: type[_Config]) -> _Config:
    try:
        return kind.model_validate_json(path.read_text())
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
