"""The state that the prefix cache keeps of a sparse prefill lies between blocks, where others may go on from it.

SGLang copies the state of layers with linear attention once in a pass, at the end or shortly before. In a namespace of
blocks it would be of no use there, unless a block happens to end.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow.chunk_ends import prefill_block
from sglang_winnow.hooks import Hook
from sglang_winnow.sglang_versions.prefill import computed_range
from sglang_winnow.sglang_versions.releases import LINEAR_ATTENTION_ON_CUDA

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


def copy_between_blocks(batch: ScheduleBatch, req: Req) -> None:
    """Have SGLang copy the state of a pass behind its last whole block, as it does where prompts branch."""
    from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415

    if (block := prefill_block(req, batch.tree_cache.page_size)) is None:
        return
    start, end = computed_range(req)
    if req.mamba_branching_seqlen is not None and start < req.mamba_branching_seqlen < end:
        return
    # SGLang's kernels have states at the ends of chunks of their own.
    step = math.lcm(block, get_server_args().mamba_cache_chunk_size)
    req.mamba_branching_seqlen = end // step * step


_PREPARE: Final = "sglang.srt.managers.schedule_batch.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend"
HOOKS: Final = (Hook(_PREPARE, copy_between_blocks, HookType.BEFORE),) if LINEAR_ATTENTION_ON_CUDA else ()
