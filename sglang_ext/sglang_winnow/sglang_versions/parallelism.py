"""Among how many ranks SGLang shares out the attention heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_winnow.sglang_versions.releases import PARALLELISM_IN_CONTEXT, runs

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator


def attention_ranks_of(configurator: KVCacheConfigurator) -> int:
    """Return the number of ranks, where the size of the KV cache is decided."""
    if not runs(PARALLELISM_IN_CONTEXT):
        return int(configurator.ps.attn_tp_size)
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    return int(get_parallel().attn_tp_size)
