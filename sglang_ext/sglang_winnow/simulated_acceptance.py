"""Drafts that stand by chance, for measuring speed with random weights (``SGLANG_SIMULATE_ACC_LEN``)."""

from __future__ import annotations

from typing import Final

import torch
from sglang.srt.environ import envs
from torch import Tensor

from winnow_kernels.host_tensors import to_device

# The same on all ranks.
_DRAW: Final = torch.Generator().manual_seed(0)


def simulated_acceptance(limits: Tensor) -> Tensor | None:
    """Return how many of each row's drafts are taken to stand, int64 [rows]; None where drafts are really compared.

    ``SGLANG_SIMULATE_ACC_LEN`` is the mean of what a check comes to: drafts that stand, and one more token.

    Args:
        limits: int64 [rows]; how many each row has drafted.
    """
    if (mean := envs.SGLANG_SIMULATE_ACC_LEN.get()) <= 0:
        return None
    standing = torch.floor(torch.rand(len(limits), generator=_DRAW) + (mean - 1))
    return to_device(standing.long().clamp_(min=0), limits.device).minimum(limits)
