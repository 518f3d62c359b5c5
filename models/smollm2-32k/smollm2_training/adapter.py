"""The low-rank adapter: trained in float32, kept in PEFT's format, merged into bfloat16 weights."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from smollm2_training.network import PROJECTIONS, Weights

SHARD_BYTES = 15 * 2**20
CONTEXT_LENGTH = 32_768
_PREFIX = "base_model.model.model.layers"


class Adapter:
    """W becomes W + scale · B·A for each projection of each layer; scale is alpha ÷ rank.

    The merged weights are what the network runs with in training too, rounded to bfloat16 as they will be when the
    adapter is merged for serving. For matrices this small that costs less than running A and B beside W.

    Attributes:
        a: by projection, float32 [layers, rank, in]; random at the start.
        b: by projection, float32 [layers, out, rank]; zero at the start, so that the first merge changes nothing.
    """

    def __init__(self, base: Weights, rank: int, alpha: float, rope_base: float, seed: int = 0) -> None:
        self.base, self.rank, self.alpha, self.rope_base = base, rank, alpha, rope_base
        generator = torch.Generator().manual_seed(seed)
        self.a: dict[str, Tensor] = {}
        self.b: dict[str, Tensor] = {}
        for name in PROJECTIONS:
            layers, rows, columns = base.projections[name].shape
            device = base.projections[name].device
            random = torch.randn(layers, rank, columns, generator=generator) / (3 * columns) ** 0.5
            self.a[name] = random.to(device).requires_grad_()
            self.b[name] = torch.zeros(layers, rows, rank, device=device, requires_grad=True)

    @property
    def scale(self) -> float:
        """What B·A is multiplied with."""
        return self.alpha / self.rank

    def parameters(self) -> list[Tensor]:
        """What is trained, always in the same order."""
        return [tensor for name in PROJECTIONS for tensor in (self.a[name], self.b[name])]

    def merged(self) -> Weights:
        """The weights with the adapter in them; gradients flow to ``a`` and ``b``."""
        projections = {
            name: torch.baddbmm(weight.float(), self.b[name], self.a[name], alpha=self.scale).to(weight.dtype)
            for name, weight in self.base.projections.items()
        }
        return self.base._replace(projections=projections)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        layers = next(iter(self.a.values())).shape[0]
        for layer in range(layers):
            for name, path in PROJECTIONS.items():
                yield f"{_PREFIX}.{layer}.{path}.lora_A.weight", self.a[name].detach()[layer]
                yield f"{_PREFIX}.{layer}.{path}.lora_B.weight", self.b[name].detach()[layer]

    def save(self, folder: Path) -> None:
        """Write bfloat16 shards of at most ``SHARD_BYTES`` and both configurations, each file whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        shards: list[dict[str, Tensor]] = [{}]
        size = 0
        for name, tensor in self._tensors():
            compact = tensor.to("cpu", torch.bfloat16).contiguous()
            # Names, shapes and offsets take up to 200 bytes each in the file's head.
            needed = compact.nbytes + 200
            if size + needed > SHARD_BYTES:
                shards.append({})
                size = 0
            shards[-1][name] = compact
            size += needed
        names = [f"adapter-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        for stale in folder.glob("adapter-*.safetensors"):
            if stale.name not in names:
                stale.unlink()
        for name, shard in zip(names, shards, strict=True):
            partial = folder / f"{name}.partial"
            save_file(shard, partial)
            partial.replace(folder / name)
        configuration = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "smollm2",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": False,
            "target_modules": list(PROJECTIONS),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        write_json(folder / "adapter_config.json", configuration)
        model = {"rope_theta": self.rope_base, "max_position_embeddings": CONTEXT_LENGTH}
        write_json(folder / "model_config.json", model)

    def load(self, folder: Path) -> None:
        """Take what ``save`` wrote.

        Raises:
            ValueError: the folder's adapter is of another rank, alpha or rotary base, or not whole.
        """
        configuration = json.loads((folder / "adapter_config.json").read_text())
        model = json.loads((folder / "model_config.json").read_text())
        found = (configuration["r"], configuration["lora_alpha"], model["rope_theta"])
        if found != (self.rank, self.alpha, self.rope_base):
            raise ValueError(
                f"{folder} holds an adapter of rank, alpha and rotary base {found}, "
                f"not {(self.rank, self.alpha, self.rope_base)}"
            )
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("adapter-*.safetensors")):
            with safe_open(file, "pt") as shard:
                tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        wanted = dict(self._tensors())
        if tensors.keys() != wanted.keys():
            raise ValueError(f"{folder} does not hold one whole adapter: {len(tensors)} of {len(wanted)} tensors")
        with torch.no_grad():
            for name, tensor in wanted.items():
                tensor.copy_(tensors[name])


def read_adapter(folder: Path, base: Weights) -> Adapter:
    """The adapter of ``folder``, on ``base``."""
    configuration = json.loads((folder / "adapter_config.json").read_text())
    model = json.loads((folder / "model_config.json").read_text())
    adapter = Adapter(base, configuration["r"], configuration["lora_alpha"], model["rope_theta"])
    adapter.load(folder)
    return adapter


def write_json(path: Path, document: object) -> None:
    """Write ``document``, whole or not at all."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".partial")
    with os.fdopen(handle, "w") as file:
        file.write(json.dumps(document, indent=2) + "\n")
    Path(partial).chmod(0o644)
    Path(partial).replace(path)
