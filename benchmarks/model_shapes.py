"""The shapes of published models, and folders from which SGLang serves them with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sglang_winnow.delta_profiles import PROFILE_FILE, DeltaProfile, config_hash

_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a model's ``config.json`` says.

    Attributes:
        family: its ``model_type``.
        context_length: tokens it was made for.
        ties_embeddings: whether the output's matrix is that of the input.
        delta_layers: its Δ-layers by default, for the policy ``delta``; none where nobody has named any.
        more: what else is in ``config.json``.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    ties_embeddings: bool = False
    delta_layers: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def element_size(self) -> int:
        """Bytes of a weight, and of a number in the KV cache."""
        return 4 if self.dtype == "float32" else 2

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's K and V in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that a decode step reads."""
        attention = 2 * self.hidden_size * self.head_dim * (self.query_heads + self.kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.element_size * (self.layers * (attention + mlp) + self.hidden_size * self.vocab_size)

    def config(self, context_length: int) -> dict[str, Any]:
        """Return the content of ``config.json``, for contexts of up to ``context_length`` tokens at least."""
        return {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": max(context_length, self.context_length),
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "tie_word_embeddings": self.ties_embeddings,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": self.dtype,
            **self.more,
        }


SHAPES: Final[Mapping[str, ModelShape]] = {
    "Llama-3.1-8B": ModelShape(
        family="llama",
        hidden_size=4096,
        intermediate_size=14336,
        layers=32,
        query_heads=32,
        kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        context_length=131072,
        rms_norm_eps=1e-5,
        delta_layers=(2, 8, 18, 22),
        more={
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "Qwen3-4B": ModelShape(
        family="qwen3",
        hidden_size=2560,
        intermediate_size=9728,
        layers=36,
        query_heads=32,
        kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        context_length=40960,
        rms_norm_eps=1e-6,
        ties_embeddings=True,
        more={"rope_theta": 1000000.0},
    ),
    "Qwen2.5-7B": ModelShape(
        family="qwen2",
        hidden_size=3584,
        intermediate_size=18944,
        layers=28,
        query_heads=28,
        kv_heads=4,
        head_dim=128,
        vocab_size=152064,
        context_length=131072,
        rms_norm_eps=1e-6,
        delta_layers=(2, 14, 22),
        more={"rope_theta": 1000000.0},
    ),
    "Qwen2.5-1.5B": ModelShape(
        family="qwen2",
        hidden_size=1536,
        intermediate_size=8960,
        layers=28,
        query_heads=12,
        kv_heads=2,
        head_dim=128,
        vocab_size=151936,
        context_length=131072,
        rms_norm_eps=1e-6,
        ties_embeddings=True,
        delta_layers=(2, 14, 23),
        more={"rope_theta": 1000000.0},
    ),
    # v0.3, which has no sliding window.
    "Mistral-7B": ModelShape(
        family="mistral",
        hidden_size=4096,
        intermediate_size=14336,
        layers=32,
        query_heads=32,
        kv_heads=8,
        head_dim=128,
        vocab_size=32768,
        context_length=32768,
        rms_norm_eps=1e-5,
        more={"rope_theta": 1000000.0, "sliding_window": None},
    ),
    # No model: for trying out the benchmarks themselves, on a CPU too.
    "tiny": ModelShape(
        family="llama",
        hidden_size=256,
        intermediate_size=256,
        layers=2,
        query_heads=4,
        kv_heads=1,
        head_dim=64,
        vocab_size=512,
        context_length=8192,
        rms_norm_eps=1e-6,
        delta_layers=(1,),
        dtype="float32",
        more={"rope_theta": 1000000.0},
    ),
}


def shape_named(name: str) -> ModelShape:
    """Return the shape called ``name``.

    Raises:
        ValueError: there is none.
    """
    if name not in SHAPES:
        raise ValueError(f"no shape is called {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def write_model(folder: Path, name: str, context_length: int, delta_layers: tuple[int, ...]) -> Path:
    """Write what SGLang serves the shape called ``name`` from, without weights or tokenizer; return the folder.

    Args:
        folder: in which the model's folder is made.
        name: of the shape.
        context_length: tokens of the longest request; beyond what the model was made for, its rotation is computed all
            the same, and takes as long.
        delta_layers: written as the model's profile; none if empty.
    """
    shape = shape_named(name)
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    config = shape.config(context_length)
    (own / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if delta_layers:
        profile = DeltaProfile(
            model=name,
            layers=shape.layers,
            config_sha256=config_hash(config),
            delta_layers=delta_layers,
            full_layers=min(delta_layers),
            source="benchmarks/model_shapes.py; the weights are random",
        )
        (own / PROFILE_FILE).write_text(profile.model_dump_json(indent=2) + "\n")
    return own
