"""The ranks among which SGLang shares out the attention heads, and how they reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed
from torch import Tensor
from torch.distributed import ReduceOp

from winnow_kernels.decode.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator


def attention_ranks() -> Ranks:
    """Return the ranks among which SGLang shares out the attention heads."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group  # noqa: PLC0415

    group = get_attn_tp_group()
    if group.world_size == 1:
        return ALONE
    return Ranks(group.rank_in_group, lambda numbers, operation: _reduce(group, numbers, operation))


def _reduce(group: GroupCoordinator, numbers: Tensor, operation: ReduceOp.RedOpType) -> None:
    # ``GroupCoordinator.all_reduce`` can only add. SGLang keeps its own NCCL communicator for CUDA graphs and has it
    # switched off elsewhere; on the stream of the forward pass it orders itself as the captured ones do.
    nccl = group.pynccl_comm
    if nccl is None or not nccl.available:
        torch.distributed.all_reduce(numbers, operation, group=group.device_group)
        return
    with nccl.change_state(enable=True):
        nccl.all_reduce(numbers, operation)
