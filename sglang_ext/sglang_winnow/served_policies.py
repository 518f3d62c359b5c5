"""Which decode policies a server serves: on CUDA each takes memory, and time at start."""

from __future__ import annotations

import os
from typing import Final

import torch

from winnow_kernels.policies.declarations import DECLARATIONS
from winnow_kernels.policies.registry import DECODE_POLICIES

ENVIRONMENT: Final = "WINNOW_POLICIES"


def served_policies() -> tuple[str, ...]:
    """Return the policies that the environment names, with commas between; ``dense`` always.

    Without a name they are all, on CUDA all that were faster than dense on a GPU.

    Raises:
        ValueError: one of them is no decode policy.
    """
    names = os.environ.get(ENVIRONMENT)
    if names is None:
        on_gpu = torch.cuda.is_available()
        return tuple(name for name in DECODE_POLICIES if DECLARATIONS[name].pays_on_gpu or not on_gpu)
    given = {name.strip() for name in names.split(",") if name.strip()}
    if unknown := sorted(given.difference(DECODE_POLICIES)):
        raise ValueError(
            f"{ENVIRONMENT}: no decode policy is called {unknown[0]!r}; there are {', '.join(DECODE_POLICIES)}"
        )
    return tuple(name for name in DECODE_POLICIES if name in given | {"dense"})
