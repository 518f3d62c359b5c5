"""Small tensors that are made on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to ``device``; on a GPU that waits for nothing that runs there."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
