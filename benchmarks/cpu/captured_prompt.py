"""The attention inputs of one real prompt: what selectors do with random keys says nothing."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.needle_prompt import needle_prompt
from winnow_evaluation.offline_model import OfflineModel
from winnow_kernels.attend.dense import prefill
from winnow_kernels.cache import LayerCache

STEPS: Final = 8
"""Answer tokens behind the prompt; each is the newest token of a decode step."""
WINDOW: Final = 128
"""The prompt's last tokens whose queries are kept, for policies that let them vote."""


@dataclass(frozen=True)
class CapturedPrompt:
    """A prompt and the first tokens of its answer, as each layer of a model attends to them. A list has all layers.

    Attributes:
        prompt_length: tokens in the prompt.
        queries: [window + steps, query heads, head dim], rotated; of the last tokens.
        keys: [tokens, KV heads, head dim], rotated.
        values: same shape.
        scale: of the scores.
    """

    prompt_length: int
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    scale: float

    @property
    def steps(self) -> int:
        return len(self.keys[0]) - self.prompt_length

    @property
    def window(self) -> int:
        return len(self.queries[0]) - self.steps


def captured_prompt(folder: Path, length: int, cache: Path, seed: int = 0) -> CapturedPrompt:
    """Return a prompt of ``length`` tokens, answer tokens included, as the model in ``folder`` attends to it.

    It is kept in the folder ``cache``: the model reads it once.
    """
    weights = [(path.name, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safetensors"))]
    digest = hashlib.sha256(f"{folder.resolve()}{weights}{length}/{STEPS}/{WINDOW}/{seed}".encode()).hexdigest()[:16]
    path = cache / f"{digest}.pt"
    if path.is_file():
        return CapturedPrompt(**torch.load(path))
    captured = _capture(folder, length, seed)
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(asdict(captured), unfinished)
    unfinished.rename(path)
    return captured


def _capture(folder: Path, length: int, seed: int) -> CapturedPrompt:
    prompt, answer = needle_prompt(AutoTokenizer.from_pretrained(folder), length - STEPS, seed)
    tokens = torch.tensor([prompt + answer[:STEPS]])
    captured = CapturedPrompt(len(prompt), [], [], [], 0.0)
    scales: list[float] = []

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        del layer
        captured.queries.append(queries[0, -(WINDOW + STEPS) :].clone())
        captured.keys.append(keys[0].contiguous())
        captured.values.append(values[0].contiguous())
        scales.append(scale)
        own = LayerCache(captured.keys[-1], captured.values[-1])
        return prefill(queries[0].contiguous(), torch.arange(tokens.shape[1]), own, scale)[None]

    model = OfflineModel(folder, torch.device("cpu"))
    with torch.inference_mode():
        model.hidden(tokens, torch.arange(tokens.shape[1])[None], attend)
    return CapturedPrompt(len(prompt), captured.queries, captured.keys, captured.values, scales[0])
