"""Which cores each rank of a server on a CPU has, where it has more ranks than the machine has memory nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import torch
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.utils import get_cpu_ids_by_node

from sglang_winnow.hooks import LAUNCH, Hook
from sglang_winnow.sglang_versions.arguments import resolved
from sglang_winnow.sglang_versions.releases import RANKS_BY_MEMORY_NODE, runs

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

ENVIRONMENT: Final = "SGLANG_CPU_OMP_THREADS_BIND"
"""Where SGLang reads the cores of each rank, with ``|`` between ranks; by default a rank has those of a memory node."""


def share_cores(ranks: int, nodes: Sequence[str]) -> str:
    """Return as even a part of all cores for each rank, as SGLang reads it.

    Args:
        ranks: at least 1; beyond the number of cores they share them.
        nodes: of each memory node its cores, with commas between.
    """
    cores = [core for node in nodes for core in node.split(",")]
    bounds = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    parts = (cores[start : max(start + 1, end)] for start, end in pairwise(bounds))
    return "|".join(map(",".join, parts))


def _bind_before_launch(_engine: object, server_args: ServerArgs, *_: object, **__: object) -> None:
    # SGLang lets no rank start then. The processes of the ranks inherit the environment.
    ranks = resolved(server_args).dp_size
    nodes = get_cpu_ids_by_node()
    if ranks > len(nodes) and ENVIRONMENT not in os.environ:
        os.environ[ENVIRONMENT] = share_cores(ranks, nodes)


HOOKS: Final = (
    (Hook(LAUNCH, _bind_before_launch, HookType.BEFORE),)
    if runs(RANKS_BY_MEMORY_NODE) and not torch.cuda.is_available()
    else ()
)
