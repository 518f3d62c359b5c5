"""From which context length on a policy is no slower than dense attention, on this machine."""

from __future__ import annotations

import os
from functools import cache
from typing import Final

import torch

from winnow_kernels.policies.declarations import DECLARATIONS

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
        measured = DECLARATIONS[policy].crossover
        return measured.cuda if torch.cuda.is_available() else measured.cpu
    if not override.isdecimal():
        raise ValueError(f"{ENVIRONMENT}: must be a number of tokens from 0 on")
    return int(override)
