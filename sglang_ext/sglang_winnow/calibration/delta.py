"""Calibrating DELTA: decode prompts with full attention, and choose the layers at which attention shifts most."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_winnow.calibration.attention_maps import ATTENTION, decode_shifts
from sglang_winnow.delta_profiles import DeltaProfile, config_hash
from winnow_kernels.delta_calibration import MeanShifts, choose_delta_layers


def calibrate(
    folder: Path, prompts: Sequence[str], device: str, steps: int, full_layers: int, words: int
) -> DeltaProfile:
    """Return the profile of the model in ``folder``.

    Args:
        folder: a model that transformers loads, with its tokenizer.
        prompts: what it decodes answers to.
        device: where it runs, such as ``cpu`` or ``cuda``; in float32 on a CPU, else in the model's own dtype.
        steps: most tokens of an answer.
        full_layers: how many of the first layers are always dense.
        words: the prompts' length, for the record.

    Raises:
        OSError, ValueError: the model cannot be loaded, a prompt is too long for it, or it has no room for Δ-layers.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = torch.float32 if device == "cpu" else "auto"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION).to(device).eval()
    shifts = MeanShifts()
    for number, text in enumerate(prompts, start=1):
        prompt = _tokens(tokenizer, text).to(device)
        _check_length(len(prompt) + steps, model)
        for step in decode_shifts(model, prompt, steps, _end_tokens(model)):
            shifts.add(step.cpu())
        sys.stderr.write(f"{number} of {len(prompts)}: {len(prompt)} tokens, {shifts.steps} decode steps so far\n")
    mean = shifts.mean()
    return DeltaProfile(
        model=folder.resolve().name,
        layers=len(mean),
        config_sha256=config_hash(json.loads((folder / "config.json").read_text())),
        delta_layers=choose_delta_layers(mean, full_layers),
        full_layers=full_layers,
        source="winnow calibrate delta",
        samples=len(prompts),
        words=words,
        steps=shifts.steps,
        shifts=tuple(round(shift, 4) for shift in mean),
    )


def _tokens(tokenizer: Any, text: str) -> Tensor:
    if tokenizer.chat_template is None:
        return torch.tensor(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    return torch.tensor(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    )


def _check_length(tokens: int, model: Any) -> None:
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and tokens > longest:
        raise ValueError(f"--words: a prompt and its answer need {tokens} tokens; the model's context has {longest}")


def _end_tokens(model: Any) -> frozenset[int]:
    end = model.generation_config.eos_token_id
    return frozenset([end] if isinstance(end, int) else end or ())
