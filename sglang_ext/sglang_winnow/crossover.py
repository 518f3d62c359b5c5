"""From which context length on a policy is no slower than dense attention, by benchmarks/cpu_attention.py."""

from __future__ import annotations

import os
from functools import cache
from typing import Final

import torch

# Tokens. At and below, a step on a CPU runs dense. Where the shipped model's attention is as diffuse as it is, `tactic`
# reads half of a context at p = 0.9, and does not pay at any length that it serves.
MEASURED: Final = {
    "streaming_llm": 4096,
    "snapkv": 4096,
    "pyramidkv": 4096,
    "delta": 8192,
    "quest": 16_384,
    "quoka": 28_672,
    "tactic": 32_768,
}

# For evaluations and tests of a policy itself: the same length for all policies, 0 for none.
ENVIRONMENT: Final = "WINNOW_CROSSOVER_TOKENS"


@cache
def crossover_tokens(policy: str) -> int:
    """Return the longest context, in tokens, at which a step of the decode policy called ``policy`` runs dense.

    On CUDA nothing has been measured yet, and policies act at every length.

    Raises:
        ValueError: the environment sets another length, and it is not a whole number from 0 on.
    """
    override = os.environ.get(ENVIRONMENT)
    if override is None:
        return 0 if torch.cuda.is_available() else MEASURED[policy]
    if not override.isdecimal():
        raise ValueError(f"{ENVIRONMENT}: must be a number of tokens from 0 on")
    return int(override)
