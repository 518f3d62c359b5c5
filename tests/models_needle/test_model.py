"""The weights that ship: their form, and that they answer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from needle_training.network import Shape
from needle_training.tokenizer import ASSISTANT, END
from winnow_evaluation.tasks import TASKS
from winnow_evaluation.tasks.scoring import found_fraction

MEBIBYTE = 2**20
WORDS = 830
"""Words of context that make about 1,000 tokens."""


@pytest.fixture(scope="module")
def config(folder: Path) -> dict[str, Any]:
    """``config.json``."""
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model in float32, and what transformers found wrong with its files."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    return model.float().eval(), info


def test_it_is_a_llama_of_the_shape_that_the_trainer_makes(config: dict[str, Any]) -> None:
    shape = Shape()
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == 32_768
    assert config["num_attention_heads"] // config["num_key_value_heads"] == shape.heads // shape.kv_heads == 4
    assert config["head_dim"] == shape.head_dim == 64
    assert 12 <= config["num_hidden_layers"] == shape.layers <= 16
    assert config["vocab_size"] == shape.vocabulary
    assert config["hidden_size"] == shape.hidden
    assert config["intermediate_size"] == shape.intermediate


def test_the_files_are_small_and_the_index_names_every_weight_once(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values())
    held: dict[str, str] = {}
    size = 0
    for file in files:
        assert file.stat().st_size <= 16 * MEBIBYTE
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118, the shard itself cannot be iterated
                assert name not in held
                held[name] = file.name
                weight = shard.get_tensor(name)
                assert weight.dtype == torch.bfloat16
                assert weight.isfinite().all()
                size += weight.nbytes
    assert held == index["weight_map"]
    assert size == index["metadata"]["total_size"]


def test_transformers_finds_each_weight_and_no_other(loaded: tuple[Any, dict[str, Any]]) -> None:
    model, info = loaded
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 10e6 <= sum(weight.numel() for weight in model.parameters()) <= 30e6
    assert model.config.rope_parameters["rope_theta"] == Shape().rope_base


@pytest.mark.parametrize(
    ("name", "seed"),
    [("niah_single_2", 0), ("niah_single_2", 1), ("niah_single_2", 2), ("niah_multivalue", 0)],
)
def test_it_finds_needles(loaded: tuple[Any, dict[str, Any]], folder: Path, name: str, seed: int) -> None:
    model, _ = loaded
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = TASKS[name]
    sample = task.make(random.Random(seed), WORDS)
    messages = [{"role": "user", "content": sample.prompt}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    length = prompt["input_ids"].shape[1]
    assert 900 <= length <= 1100
    assert tokenizer.decode(prompt["input_ids"][0, -1]) == ASSISTANT
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=task.answer_tokens(WORDS), do_sample=False)[0, length:]
    answer = tokenizer.decode(output)
    assert answer.endswith(END)
    assert found_fraction(answer, sample.questions[0].references) == 1.0, answer
