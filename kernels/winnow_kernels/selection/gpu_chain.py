"""Kernels that start while the one before them still runs, and wait for its results only (CUDA's programmatic dependent
launch).

A kernel begins with ``wait_for_previous``. All of a chain must: one that ends without having waited would let the next
one go on before the kernels in front of it are done. What was written before the first kernel of a chain may be read
earlier.
"""

from __future__ import annotations

from typing import TypedDict

import torch
import triton
import triton.language as tl
from torch import Tensor

_HOPPER = (9, 0)


class Chained(TypedDict, total=False):
    """Arguments of a launch.

    Attributes:
        chained: of the kernel; whether it is launched so.
        launch_pdl: Triton's own.
    """

    chained: bool
    launch_pdl: bool


def chained(tensor: Tensor) -> Chained:
    """Return the arguments of a launch where ``tensor`` is; nothing is chained on CPUs, and before Hopper."""
    if tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= _HOPPER:
        return {"chained": True, "launch_pdl": True}
    return {"chained": False}


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_previous(chained: tl.constexpr) -> None:
    """Wait until the kernel launched before is done, and let the one launched next start."""
    if chained:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
