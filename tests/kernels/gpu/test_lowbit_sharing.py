"""How the low-bit policies' programs are dealt out to the rows that act."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.policies.lowbit_top_p.gpu.state import Policies, own_part

KV_HEADS = 2


@triton.jit  # type: ignore[untyped-decorator]
def _deal_kernel(policies: Policies, dealt_ptr: tl.tensor, row_block: tl.constexpr) -> None:
    row, part, sharing = own_part(policies, row_block)
    programs = tl.num_programs(0) * tl.num_programs(1)
    number = tl.program_id(2) * programs + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(dealt_ptr + number * 3, row)
    tl.store(dealt_ptr + number * 3 + 1, part)
    tl.store(dealt_ptr + number * 3 + 2, sharing)


def dealt(acting: list[int], of_pair: int, device: torch.device) -> Tensor:
    """Return row, part and sharing of each program: [KV heads, programs, 3]."""
    rows = len(acting)
    acts = torch.tensor(acting, dtype=torch.int32, device=device)
    found = torch.full((KV_HEADS, of_pair * rows, 3), -1, dtype=torch.int64, device=device)
    policies = Policies(acts, acts.double(), *[acts] * 5)
    _deal_kernel[(of_pair, rows, KV_HEADS)](policies, found, row_block=triton.next_power_of_2(rows))
    return found.cpu()


@pytest.mark.parametrize(
    "acting",
    [[1], [0, 1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1], [1, 0, 1, 1, 0, 1, 0, 1, 1], [0, 0, 0]],
    ids=lambda acting: "".join(map(str, acting)),
)
@pytest.mark.parametrize("of_pair", [1, 3])
def test_rows_that_act_have_all_programs(acting: list[int], of_pair: int, device: torch.device) -> None:
    own = [row for row, acts in enumerate(acting) if acts]
    share = of_pair * len(acting) // max(1, len(own))
    expected = sorted((row, part, share) for row in own for part in range(share))
    for of_head in dealt(acting, of_pair, device):
        assert ((of_head[:, 0] >= 0) & (of_head[:, 0] < len(acting))).all()
        assert sorted(map(tuple, of_head[of_head[:, 2] > 0].tolist())) == expected
