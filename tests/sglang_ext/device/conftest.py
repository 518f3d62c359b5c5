"""As ``tests/kernels/gpu``: on a GPU, or in a process in Triton's interpreter."""

from __future__ import annotations

import torch

from sglang_winnow.sglang_versions.releases import LINEAR_ATTENTION_ON_CUDA
from tests.kernels.gpu.conftest import INTERPRETED, device

__all__ = ["device"]

# SGLang's classes that have states are of one release.
collect_ignore = [] if LINEAR_ATTENTION_ON_CUDA else ["test_linear_layers.py"]
if not (torch.cuda.is_available() or INTERPRETED):
    collect_ignore_glob = ["test_*.py"]
