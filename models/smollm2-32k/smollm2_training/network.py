"""SmolLM2's network (a Llama), written for training a low-rank adapter at 32K tokens.

The weights are arguments, so that one forward serves the model being trained (merged weights), the model it started
from (base weights, base rotary base) and the evaluation. Everything but the attention works on a flat list of tokens
of constant length, whatever the sequence length, and is compiled once; attention runs between the compiled halves of
each layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Shape:
    """Sizes of the network."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_base: float
    norm_epsilon: float

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """From a model folder's ``config.json``, as transformers 4 or 5 writes it.

        Raises:
            ValueError: not a Llama with tied embeddings and plain rotary embedding.
        """
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if config["model_type"] != "llama" or not config.get("tie_word_embeddings"):
            raise ValueError("the base model must be a Llama with tied embeddings")
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"the base model must have plain rotary embedding, not {rope['rope_type']!r}")
        heads = config["num_attention_heads"]
        return cls(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            rope_base=float(rope.get("rope_theta") or config["rope_theta"]),
            norm_epsilon=config["rms_norm_eps"],
        )

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.heads // self.kv_heads


PROJECTIONS = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
"""The matrices that an adapter changes, and where transformers keep them within a layer."""


class Weights(NamedTuple):
    """Weights stacked over the layers.

    Attributes:
        projections: by the names of ``PROJECTIONS``, each [layers, out, in].
        attention_norm, mlp_norm: [layers, hidden], float32.
        final_norm: [hidden], float32.
        embedding: [vocabulary, hidden]; its transpose makes the logits.
    """

    projections: dict[str, Tensor]
    attention_norm: Tensor
    mlp_norm: Tensor
    final_norm: Tensor
    embedding: Tensor


def load(folder: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[Shape, Weights]:
    """Read a model folder (``config.json``, ``*.safetensors``).

    Raises:
        FileNotFoundError: the folder has no weights.
    """
    shape = Shape.of(json.loads((folder / "config.json").read_text()))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}

    def stack(name: str, kind: torch.dtype) -> Tensor:
        layers = [tensors[f"model.layers.{layer}.{name}.weight"] for layer in range(shape.layers)]
        return torch.stack(layers).to(device, kind)

    return shape, Weights(
        projections={name: stack(path, dtype) for name, path in PROJECTIONS.items()},
        attention_norm=stack("input_layernorm", torch.float32),
        mlp_norm=stack("post_attention_layernorm", torch.float32),
        final_norm=tensors["model.norm.weight"].to(device, torch.float32),
        embedding=tensors["model.embed_tokens.weight"].to(device, dtype),
    )


def rotations(shape: Shape, rope_base: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, each float32 [tokens, 1, head_dim / 2]."""
    half = shape.head_dim // 2
    frequency = rope_base ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angle = positions.float()[:, None, None] * frequency
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding as Llama applies it. x: [tokens, heads, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm, computed in float32."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight, epsilon).to(x.dtype)


def _before_attention(
    x: Tensor, scale: Tensor, query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x: [tokens, hidden] -> query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim]."""
    head_dim = 2 * cosine.shape[-1]
    projected = F.linear(norm(x, scale, epsilon), torch.cat((query, key, value))).view(x.shape[0], -1, head_dim)
    q, k, v = torch.split(projected, [w.shape[0] // head_dim for w in (query, key, value)], dim=1)
    return _rotate(q, cosine, sine), _rotate(k, cosine, sine), v.contiguous()


def _after_attention(
    x: Tensor, attended: Tensor, output: Tensor, scale: Tensor, gate: Tensor, up: Tensor, down: Tensor, epsilon: float
) -> Tensor:
    """x: [tokens, hidden], attended: [tokens, heads * head_dim] -> [tokens, hidden]."""
    x = x + F.linear(attended, output)
    g, u = F.linear(norm(x, scale, epsilon), torch.cat((gate, up))).chunk(2, dim=-1)
    return x + F.linear(F.silu(g) * u, down)


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, query, key, value)``: flat, as ``_before_attention`` returns them -> [tokens, heads, head_dim]."""


class Network:
    """The forward pass of one shape.

    Args:
        shape: sizes.
        compiled: compile the halves of a layer for the token count that comes first; for training on a GPU.
        attention: how PyTorch's fused attention is to be computed; its own choice without it.
    """

    def __init__(self, shape: Shape, *, compiled: bool = False, attention: SDPBackend | None = None) -> None:
        self.shape, self.attention = shape, attention
        self._before, self._after = _before_attention, _after_attention
        if compiled:
            self._before = torch.compile(_before_attention, dynamic=False)
            self._after = torch.compile(_after_attention, dynamic=False)

    def causal(self, batch: int) -> Attend:
        """Causal attention within each of ``batch`` rows of equal length."""
        shape = self.shape

        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q = q.view(batch, -1, shape.heads, shape.head_dim).transpose(1, 2)
            k = k.view(batch, -1, shape.kv_heads, shape.head_dim).transpose(1, 2).repeat_interleave(shape.group, dim=1)
            v = v.view(batch, -1, shape.kv_heads, shape.head_dim).transpose(1, 2).repeat_interleave(shape.group, dim=1)
            chosen: AbstractContextManager[None] = sdpa_kernel(self.attention) if self.attention else nullcontext()
            with chosen:
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return attended.transpose(1, 2).flatten(0, 1)

        return attend

    def hidden(self, weights: Weights, tokens: Tensor, positions: Tensor, rope_base: float, attend: Attend) -> Tensor:
        """Final hidden states after the last norm, [tokens, hidden], ready for ``weights.embedding``.

        Args:
            weights: base or merged.
            tokens: int64 [tokens], all rows one after another.
            positions: int64 [tokens], each token's position in its row.
            rope_base: base of the rotary frequencies.
            attend: the attention.
        """
        cosine, sine = rotations(self.shape, rope_base, positions)
        x = F.embedding(tokens, weights.embedding)
        if torch.is_grad_enabled():
            # Or the first layer, whose input needs no gradient, would be compiled apart from the others.
            x.requires_grad_()
        epsilon = self.shape.norm_epsilon
        layers = {name: stack.unbind(0) for name, stack in weights.projections.items()}
        for layer in range(self.shape.layers):
            w = {name: stack[layer] for name, stack in layers.items()}
            scale = weights.attention_norm[layer]
            q, k, v = self._before(x, scale, w["q_proj"], w["k_proj"], w["v_proj"], cosine, sine, epsilon)
            attended = attend(layer, q, k, v).flatten(1)
            scale = weights.mlp_norm[layer]
            x = self._after(x, attended, w["o_proj"], scale, w["gate_proj"], w["up_proj"], w["down_proj"], epsilon)
        return norm(x, weights.final_norm, epsilon)

    def rows(self, weights: Weights, tokens: Tensor, rope_base: float) -> Tensor:
        """``hidden`` of whole rows. tokens: int64 [batch, length] -> [batch * length, hidden]."""
        batch, length = tokens.shape
        positions = torch.arange(length, device=tokens.device).repeat(batch)
        return self.hidden(weights, tokens.flatten(), positions, rope_base, self.causal(batch))


def fastest_attention(shape: Shape, length: int, device: torch.device) -> SDPBackend | None:
    """The quicker of flash attention and cuDNN's, forward and backward over one row; on a CPU PyTorch's own choice.

    cuDNN's is taken only where it computes the same.
    """
    if device.type != "cuda":
        return None
    size = (4, 1, length, shape.heads, shape.head_dim)
    query, key, value, slope = torch.randn(size, device=device, dtype=torch.bfloat16).transpose(2, 3).unbind(0)
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    seconds: dict[SDPBackend, float] = {}
    computed: dict[SDPBackend, tuple[Tensor, ...]] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            for _ in range(3):
                torch.cuda.synchronize()
                started = perf_counter()
                with sdpa_kernel(backend):
                    attended = F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True)
                    computed[backend] = (attended.detach(), *torch.autograd.grad(attended, inputs, slope))
                torch.cuda.synchronize()
                seconds[backend] = perf_counter() - started
        except RuntimeError as error:
            seconds.pop(backend, None)
            print(f"attention: {backend.name} does not run here: {error}", flush=True)
    print("attention:", ", ".join(f"{b.name} {1000 * s:.1f} ms" for b, s in seconds.items()), flush=True)
    if len(seconds) < 2:
        return next(iter(seconds), None)
    for flash, other in zip(*(computed[backend] for backend in seconds), strict=True):
        difference = ((flash.float() - other.float()).norm() / flash.float().norm()).item()
        if not difference < 0.02:
            print(f"attention: cuDNN differs from flash attention by {difference:.3f}, it is not used", flush=True)
            return SDPBackend.FLASH_ATTENTION
    return min(seconds, key=seconds.__getitem__)
