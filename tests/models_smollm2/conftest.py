"""A model of a few thousand weights, a tokenizer trained on the spot, and a little text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from smollm2_training.network import PROJECTIONS, Shape, Weights
from smollm2_training.packed import PackedText
from winnow_evaluation.tasks.words import ADJECTIVES, NOUNS

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SENTENCES = [
    f"The {adjective} {noun} is here, {number}."
    for number, (adjective, noun) in enumerate(zip(ADJECTIVES, NOUNS, strict=False))
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Several threads gain nothing on tensors this small, and wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Built as SmolLM2's is: single digits split off, byte-level BPE."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(SENTENCES, trainer)
    return made


@pytest.fixture(scope="session")
def packed(tokenizer: Tokenizer) -> PackedText:
    """Three documents of prose and one of code."""
    texts = [(" ".join(SENTENCES[start : start + 150]), False) for start in (0, 150, 300)]
    texts.append(("x = 1\nprint(x)\n" * 200, True))
    return PackedText.of([(np.array(tokenizer.encode(text).ids, np.uint16), code) for text, code in texts])


@pytest.fixture(scope="session")
def shape(tokenizer: Tokenizer) -> Shape:
    """Two layers, four query heads on two KV heads."""
    return Shape(
        vocabulary=tokenizer.get_vocab_size(),
        hidden=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate=48,
        rope_base=1e4,
        norm_epsilon=1e-5,
    )


@pytest.fixture
def weights(shape: Shape) -> Weights:
    """Random float32 weights."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) * 0.1

    attention, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "q_proj": (attention, shape.hidden),
        "k_proj": (kv, shape.hidden),
        "v_proj": (kv, shape.hidden),
        "o_proj": (shape.hidden, attention),
        "gate_proj": (shape.intermediate, shape.hidden),
        "up_proj": (shape.intermediate, shape.hidden),
        "down_proj": (shape.hidden, shape.intermediate),
    }
    ones = torch.ones(shape.layers, shape.hidden)
    return Weights(
        {name: random(shape.layers, *size) for name, size in sizes.items()},
        ones + random(shape.layers, shape.hidden),
        ones + random(shape.layers, shape.hidden),
        ones[0] + random(shape.hidden),
        random(shape.vocabulary, shape.hidden),
    )


@pytest.fixture
def base(shape: Shape, weights: Weights, tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """The model as a folder that transformers load."""
    folder = tmp_path / "base"
    folder.mkdir()
    tensors = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
    }
    for layer in range(shape.layers):
        tensors |= {
            f"model.layers.{layer}.{path}.weight": weights.projections[name][layer]
            for name, path in PROJECTIONS.items()
        }
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = weights.attention_norm[layer]
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"] = weights.mlp_norm[layer]
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
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
        "max_position_embeddings": 8192,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_parameters": {"rope_theta": shape.rope_base, "rope_type": "default"},
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    assert asdict(Shape.of(config)) == asdict(shape)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
