"""Shares of a ragged batch's work: every part once, as evenly as whole parts allow."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from winnow_kernels.selection.gpu_partition import own_share, owner_of

OWNERS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _visit(parts_ptr: tl.tensor, visits_ptr: tl.tensor, owners: tl.constexpr, most: tl.constexpr) -> None:
    parts = tl.load(parts_ptr + tl.arange(0, owners))
    part, end = own_share(parts)
    while part < end:
        owner, first, after = owner_of(part, parts)
        for number in range(part - first, tl.minimum(end, after) - first):
            tl.store(visits_ptr + (tl.program_id(0) * owners + owner) * most + number, 1)
        part = tl.minimum(end, after)


@pytest.mark.parametrize(
    "parts", [[3, 0, 0, 7, 1, 0, 2, 0], [0, 0, 0, 0, 0, 0, 0, 40], [0] * 8, [1, 0, 0, 0, 0, 0, 0, 0]]
)
@pytest.mark.parametrize("programs", [1, 3, 16])
def test_every_part_has_one_program(parts: list[int], programs: int, device: torch.device) -> None:
    most = 40
    visits = torch.zeros(programs, OWNERS, most, dtype=torch.int32, device=device)
    _visit[(programs,)](torch.tensor(parts, dtype=torch.int32, device=device), visits, owners=OWNERS, most=most)
    expected = torch.arange(most) < torch.tensor(parts)[:, None]
    assert torch.equal(visits.sum(0).cpu(), expected.int())
    assert visits.sum((1, 2)).max() <= -(-sum(parts) // programs)
