"""From which context length on a policy is no slower than dense attention.

On a CPU by benchmarks/cpu_attention.py; on a GPU by benchmarks/gpu_serve.py, between the lengths measured on a straight
line (8 requests of a Llama-3.1-8B's shape on an H200, ``kernels/benchmarks/results/serve.json``). `pyramidkv` was not
among them: it is taken to be like `snapkv`, whose kernels it shares.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Final

import torch

# Tokens. At and below, a step runs dense. The shipped model's attention is diffuse: at p = 0.9 `tactic` reads half of a
# context, and does not pay on a CPU at any length that the model serves.
MEASURED: Final[Mapping[str, Mapping[str, int]]] = {
    "cpu": {
        "streaming_llm": 4096,
        "snapkv": 4096,
        "pyramidkv": 4096,
        "delta": 8192,
        "quest": 16_384,
        "quoka": 28_672,
        "tactic": 32_768,
    },
    "cuda": {
        "streaming_llm": 0,
        "snapkv": 0,
        "pyramidkv": 0,
        "delta": 0,
        "quest": 6144,
        "quoka": 32_768,
        "tactic": 20_480,
    },
}

# For evaluations and tests of a policy itself: the same length for all policies, 0 for none.
ENVIRONMENT: Final = "WINNOW_CROSSOVER_TOKENS"


@cache
def crossover_tokens(policy: str) -> int:
    """Return the longest context, in tokens, at which a step of the decode policy called ``policy`` runs dense.

    Raises:
        ValueError: the environment sets another length, and it is not a whole number from 0 on.
    """
    override = os.environ.get(ENVIRONMENT)
    if override is None:
        return MEASURED["cuda" if torch.cuda.is_available() else "cpu"][policy]
    if not override.isdecimal():
        raise ValueError(f"{ENVIRONMENT}: must be a number of tokens from 0 on")
    return int(override)
