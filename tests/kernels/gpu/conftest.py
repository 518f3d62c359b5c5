"""Kernels run on a GPU if there is one, else in Triton's interpreter, which takes over a whole process.

``make test`` runs these tests in a process of their own, with TRITON_INTERPRET=1. Elsewhere, without a GPU, they are
left out.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.kernels.gpu.interpreting import patch_once

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not (torch.cuda.is_available() or INTERPRETED):
    collect_ignore_glob = ["test_*.py"]


if INTERPRETED:
    patch_once()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")
