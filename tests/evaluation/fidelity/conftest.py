"""A small random model, prompts of two lengths, and what follows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import ModelShape, write_model, write_weights
from tests.policy_rows import DRAFTS_ONLY, ROWS
from winnow_evaluation.fidelity.forcing import Forcing
from winnow_evaluation.fidelity.prefilled import PrefilledBatch
from winnow_evaluation.offline_model import OfflineModel
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy

# No multiples of the page, and continuations that fill the page which the prompt has begun.
PROMPTS, TOKENS = (203, 150), 24
SPAN, WINDOW, MEMORY = 64, 16, 2**20

SPARSE: dict[str, dict[str, Any]] = {
    name: row.small for name, row in ROWS.items() if row.small and name not in DRAFTS_ONLY
} | {
    "streaming_llm": {"sinks": 2, "window": 48},
    "quest": {"budget": 48, "full_layers": 0},
    "snapkv": {"budget": 48, "observation_window": WINDOW},
    "pyramidkv": {"budget": 48, "observation_window": WINDOW},
    "delta": {"budget": 48, "recency": 16, "full_layers": 0, "delta_layers": [0]},
    "tactic": {"p": 0.5, "full_layers": 0},
    "quoka": {"budget": 48},
}
COVERING: dict[str, dict[str, Any]] = {
    name: parameters | {"budget": 4096} for name, parameters in SPARSE.items() if "budget" in parameters
} | {
    "streaming_llm": {"window": 4096},
    "quest": {"budget": 4096},
    "snapkv": {"budget": 4096, "observation_window": WINDOW},
    "pyramidkv": {"budget": 4096, "observation_window": WINDOW},
    "delta": {"budget": 4096, "full_layers": 0, "delta_layers": [0]},
    "tactic": {"p": 1.0, "full_layers": 0},
    "quoka": {"budget": 4096},
    "lowbit_top_p": {"p": 1.0},
    "lowbit_top_k": {"budget": 4096},
}


def decode_policy(name: str, parameters: dict[str, Any], **rest: Any) -> AttentionPolicy:
    return parse_policy({"decode": {"policy": name, **parameters}, **rest})


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model"), ModelShape(kv_heads=2))
    write_weights(folder)
    return folder


@pytest.fixture(scope="session")
def model(folder: Path) -> OfflineModel:
    return OfflineModel(folder, torch.device("cpu"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 512, (length,), generator=generator).tolist() for length in PROMPTS]


@pytest.fixture(scope="session")
def following() -> Tensor:
    return torch.randint(2, 512, (len(PROMPTS), TOKENS + 1), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def batch(model: OfflineModel, prompts: list[list[int]]) -> PrefilledBatch:
    with torch.inference_mode():
        return PrefilledBatch(model, prompts, TOKENS, window=WINDOW, span=SPAN)


@pytest.fixture
def forcing(batch: PrefilledBatch, following: Tensor) -> Forcing:
    return Forcing(batch, following[:, :-1], MEMORY)
