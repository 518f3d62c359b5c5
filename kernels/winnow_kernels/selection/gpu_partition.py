"""Dealing the work of a ragged batch out to a fixed number of programs, whatever its rows need.

A grid with a program for every part that a row could have is mostly programs that find nothing to do, and they cost
time too. Here the parts of all rows are numbered through, and each program takes an equal run of neighbouring numbers.
Only what is the same whoever computes it may be dealt out so: the runs depend on the whole batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def programs_on(device: torch.device, of_multiprocessor: int) -> int:
    """Return how many programs fill ``device`` if ``of_multiprocessor`` fit a multiprocessor."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count * of_multiprocessor
    # The interpreter runs them one after another.
    return 3


@triton.jit  # type: ignore[untyped-decorator]
def own_share(parts: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the first of this program's parts, and the one after its last.

    Args:
        parts: int32 [owners]; how many each owner, a row or a row and KV head, has.
    """
    total = tl.sum(parts, axis=0)
    share = tl.cdiv(total, tl.num_programs(0))
    begin = tl.program_id(0) * share
    return begin, tl.minimum(begin + share, total)


@triton.jit  # type: ignore[untyped-decorator]
def owner_of(part: tl.tensor, parts: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the owner of a part, the number of its first part, and of the one after its last."""
    ends = tl.cumsum(parts, axis=0)
    is_before = ends <= part
    first = tl.max(tl.where(is_before, ends, 0), axis=0)
    after = tl.min(tl.where(is_before, 0x7FFFFFFF, ends), axis=0)
    return tl.sum(is_before.to(tl.int32), axis=0), first, after
