"""The network: a Llama whose weights of one kind are stacked over the layers, so that one step updates them together.

Everything but the attention works on a flat list of tokens of constant length, whatever the sequence length, and is
compiled once; attention runs between the compiled halves of each layer.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn

from needle_training.tokenizer import BEGIN, CONTEXT_LENGTH, END, PAD, SPECIAL_TOKENS, VOCABULARY_SIZE


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; the defaults are the model that ships."""

    vocabulary: int = VOCABULARY_SIZE
    hidden: int = 512
    layers: int = 12
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 768
    rope_base: float = 1e6
    norm_epsilon: float = 1e-5


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding as Llama applies it. x: [tokens, heads, head_dim]; cosine, sine: [tokens, 1, head_dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, epsilon).to(x.dtype)


@torch.compile(dynamic=False)
def _before_attention(
    x: Tensor, norm: Tensor, query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x: [tokens, hidden] -> query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim]."""
    head_dim = 2 * cosine.shape[-1]
    fused = torch.cat((query, key, value)).to(x.dtype)
    projected = F.linear(_norm(x, norm, epsilon), fused).view(x.shape[0], -1, head_dim)
    sizes = [weight.shape[0] // head_dim for weight in (query, key, value)]
    q, k, v = torch.split(projected, sizes, dim=1)
    return _rotate(q, cosine, sine), _rotate(k, cosine, sine), v.contiguous()


@torch.compile(dynamic=False)
def _after_attention(
    x: Tensor, attended: Tensor, output: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, epsilon: float
) -> Tensor:
    """x: [tokens, hidden], attended: [tokens, heads * head_dim] -> [tokens, hidden]."""
    x = x + F.linear(attended, output.to(x.dtype))
    g, u = F.linear(_norm(x, norm, epsilon), torch.cat((gate, up)).to(x.dtype)).chunk(2, dim=-1)
    return x + F.linear(F.silu(g) * u, down.to(x.dtype))


class Network(nn.Module):
    """A causal language model with tied embeddings. Weights are float32, activations ``dtype``."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        layers, hidden = shape.layers, shape.hidden
        attention, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        small = 0.02 / math.sqrt(2 * layers)

        def matrix(*size: int, std: float = 0.02) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size) * std)

        self.embedding = matrix(shape.vocabulary, hidden)
        self.query = matrix(layers, attention, hidden)
        self.key = matrix(layers, kv, hidden)
        self.value = matrix(layers, kv, hidden)
        self.output = matrix(layers, hidden, attention, std=small)
        self.gate = matrix(layers, shape.intermediate, hidden)
        self.up = matrix(layers, shape.intermediate, hidden)
        self.down = matrix(layers, hidden, shape.intermediate, std=small)
        self.attention_norm = nn.Parameter(torch.ones(layers, hidden))
        self.mlp_norm = nn.Parameter(torch.ones(layers, hidden))
        self.final_norm = nn.Parameter(torch.ones(hidden))

    def matrices(self) -> list[nn.Parameter]:
        """The stacked weight matrices of the layers, each [layers, rows, columns]."""
        return [self.query, self.key, self.value, self.output, self.gate, self.up, self.down]

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [batch, length] -> hidden states before the final norm, [batch * length, hidden]."""
        batch, length = tokens.shape
        shape = self.shape
        half = shape.head_dim // 2
        frequency = shape.rope_base ** (-torch.arange(half, device=tokens.device, dtype=torch.float32) / half)
        angle = torch.arange(length, device=tokens.device, dtype=torch.float32)[:, None] * frequency
        cosine = angle.cos().repeat(batch, 1)[:, None]
        sine = angle.sin().repeat(batch, 1)[:, None]
        x = F.embedding(tokens.flatten(), self.embedding).to(self.dtype)
        stacked = [weight.unbind(0) for weight in (*self.matrices(), self.attention_norm, self.mlp_norm)]
        group = shape.heads // shape.kv_heads
        for query, key, value, output, gate, up, down, norm1, norm2 in zip(*stacked, strict=True):
            q, k, v = _before_attention(x, norm1, query, key, value, cosine, sine, shape.norm_epsilon)
            q = q.view(batch, length, shape.heads, shape.head_dim).transpose(1, 2)
            k = k.view(batch, length, shape.kv_heads, shape.head_dim).transpose(1, 2).repeat_interleave(group, dim=1)
            v = v.view(batch, length, shape.kv_heads, shape.head_dim).transpose(1, 2).repeat_interleave(group, dim=1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            attended = attended.transpose(1, 2).reshape(batch * length, -1)
            x = _after_attention(x, attended, output, norm2, gate, up, down, shape.norm_epsilon)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden], some rows of ``forward``'s result -> float32 logits [n, vocabulary]."""
        normed = _norm(hidden, self.final_norm, self.shape.norm_epsilon)
        return F.linear(normed, self.embedding.to(self.dtype)).float()


def export(network: Network, folder: Path) -> None:
    """Write the weights in bfloat16 as transformers names them, in shards of under 16 MiB, with their configuration."""
    shape = network.shape
    weights: dict[str, Tensor] = {
        "model.embed_tokens.weight": network.embedding,
        "model.norm.weight": network.final_norm,
    }
    names = {
        "self_attn.q_proj": network.query,
        "self_attn.k_proj": network.key,
        "self_attn.v_proj": network.value,
        "self_attn.o_proj": network.output,
        "mlp.gate_proj": network.gate,
        "mlp.up_proj": network.up,
        "mlp.down_proj": network.down,
        "input_layernorm": network.attention_norm,
        "post_attention_layernorm": network.mlp_norm,
    }
    for layer in range(shape.layers):
        weights |= {f"model.layers.{layer}.{name}.weight": stack[layer] for name, stack in names.items()}
    state = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (*folder.glob("model*.safetensors"), *folder.glob("model.safetensors.index.json")):
        stale.unlink()
    save_torch_state_dict(state, folder, max_shard_size="16MB")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rope_theta": shape.rope_base,
        "rms_norm_eps": shape.norm_epsilon,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": SPECIAL_TOKENS.index(BEGIN),
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "do_sample": False,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
