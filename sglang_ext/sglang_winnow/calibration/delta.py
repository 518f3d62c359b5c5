"""Calibrating DELTA: decode prompts with full attention, and choose the layers that select best for others."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_winnow.calibration.attention_maps import ATTENTION, decode_coverage
from sglang_winnow.calibration.prompt_lengths import context_length, prompt_tokens
from sglang_winnow.delta_profiles import DeltaProfile, config_hash
from winnow_kernels.policies.delta.calibration import MeanCoverage, choose_delta_layers, covered


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
        words: the length of the longest prompt, for the record.

    Raises:
        OSError, ValueError: the model cannot be loaded, has soft caps, sink logits, linear attention or no room for
            Δ-layers, or a prompt is too long for it.
    """
    config = json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenized = [torch.tensor(prompt_tokens(tokenizer, text)) for text in prompts]
    _check_length(max(map(len, tokenized)) + steps, context_length(folder))
    dtype = torch.float32 if device == "cpu" else "auto"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION).to(device).eval()
    if has_other_softmax(model):
        raise ValueError(
            f"{folder}: Δ-layers cannot be calibrated of a model with soft caps or sink logits; name them in requests"
        )
    if has_linear_attention(model):
        raise ValueError(
            f"{folder}: Δ-layers cannot be calibrated of a model with linear attention; name them in requests"
        )
    kinds = config.get("layer_types") or ("full_attention",) * model.config.num_hidden_layers
    seeing = [layer for layer, kind in enumerate(kinds) if kind != "sliding_attention"]
    coverage = MeanCoverage()
    for number, prompt in enumerate(tokenized, start=1):
        for step in decode_coverage(model, prompt.to(device), steps, _end_tokens(model), seeing):
            coverage.add(step.cpu())
        sys.stderr.write(f"{number} of {len(prompts)}: {len(prompt)} tokens, {coverage.steps} decode steps so far\n")
    mean = coverage.mean()
    chosen = choose_delta_layers(mean, sum(layer < full_layers for layer in seeing))
    found = dict(zip(seeing, covered(mean, chosen), strict=True))
    return DeltaProfile(
        model=folder.resolve().name,
        layers=len(kinds),
        config_sha256=config_hash(config),
        delta_layers=tuple(seeing[layer] for layer in chosen),
        full_layers=full_layers,
        source="winnow calibrate delta",
        samples=len(prompts),
        words=words,
        steps=coverage.steps,
        coverage=tuple(round(found[layer], 4) if layer in found else None for layer in range(len(kinds))),
    )


def _check_length(tokens: int, longest: int | None) -> None:
    if longest is not None and tokens > longest:
        raise ValueError(f"--words: a prompt and its answer need {tokens} tokens; the model's context has {longest}")


def has_other_softmax(model: Any) -> bool:
    """Return whether a model's attention is other than that by which Δ-layers are calibrated (``attention_maps``)."""
    has_sinks = any(name.endswith("self_attn.sinks") for name, _ in model.named_parameters())
    return has_sinks or getattr(model.config, "attn_logit_softcapping", None) is not None


def has_linear_attention(model: Any) -> bool:
    """Return whether some of a model's layers attend to no tokens."""
    return "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ())


def _end_tokens(model: Any) -> frozenset[int]:
    end = model.generation_config.eos_token_id
    return frozenset([end] if isinstance(end, int) else end or ())
