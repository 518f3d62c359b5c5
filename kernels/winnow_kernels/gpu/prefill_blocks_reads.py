"""What a prefill pass reads, which its blocks say without asking the device."""

from __future__ import annotations

from collections.abc import Iterable

from winnow_kernels.cache import LayerCache
from winnow_kernels.dense import causal_tokens
from winnow_kernels.gpu.prefill_blocks import WHOLE, Block
from winnow_kernels.indexes.key_norms import KeyNorms
from winnow_kernels.quoka import PrefillReads


def reads_of(blocks: Iterable[Block], cache: LayerCache) -> PrefillReads:
    """Return what some blocks read in one layer, as ``winnow_kernels.quoka.quoka_prefill`` counts it.

    Args:
        blocks: of one request and pass, or of several.
        cache: the layer's KV cache, or that of any layer with the same heads.
    """
    return sum((_reads_of_block(block, cache) for block in blocks), PrefillReads())


def _reads_of_block(block: Block, cache: LayerCache) -> PrefillReads:
    dense = block.budget == WHOLE
    selected = block.start if dense else block.budget
    scored_bytes = 0 if dense else block.start * (cache.vector_bytes + KeyNorms.BYTES)
    attended_bytes = (selected + block.end - block.start) * 2 * cache.vector_bytes
    own = causal_tokens(block.begin - block.start, block.end - block.start)
    return PrefillReads(
        attended=cache.kv_heads * (block.queries * selected + own),
        context=cache.kv_heads * causal_tokens(block.begin, block.end),
        read_bytes=cache.kv_heads * (scored_bytes + attended_bytes),
        context_bytes=cache.kv_heads * block.end * 2 * cache.vector_bytes,
    )
