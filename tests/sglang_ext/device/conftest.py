"""As ``tests/kernels/gpu``: on a GPU, or in a process in Triton's interpreter."""

from __future__ import annotations

import torch

from tests.kernels.gpu.conftest import INTERPRETED, device

__all__ = ["device"]

if not (torch.cuda.is_available() or INTERPRETED):
    collect_ignore_glob = ["test_*.py"]
