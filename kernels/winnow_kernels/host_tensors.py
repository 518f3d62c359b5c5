"""Small tensors that are made on the host, or read there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to ``device``; on a GPU that waits for nothing that runs there."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class OnHost:
    """A copy of a tensor on the host: reading it waits for what the device has been given before, and nothing later."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._copy = tensor
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def tolist(self) -> list[Any]:
        """Return the numbers."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[Any] = self._copy.tolist()
        return numbers
