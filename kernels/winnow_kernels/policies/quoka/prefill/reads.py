"""What a prefill pass reads, which its blocks say without asking the device."""

from __future__ import annotations

from collections.abc import Iterable

from winnow_kernels.cache import LayerCache
from winnow_kernels.policies.quoka.reference import PrefillReads, block_reads
from winnow_kernels.prefill.blocks import WHOLE, Block


def reads_of(blocks: Iterable[Block], cache: LayerCache) -> PrefillReads:
    """Return what some blocks read in one layer, as ``reference.quoka_prefill`` counts it.

    Args:
        blocks: of one request and pass, or of several.
        cache: the layer's KV cache, or that of any layer with the same heads.
    """
    return sum((_reads_of_block(block, cache) for block in blocks), PrefillReads())


def _reads_of_block(block: Block, cache: LayerCache) -> PrefillReads:
    if block.budget == WHOLE:
        # One block that begins with the context.
        return PrefillReads.of_dense(block.begin, block.end, block.end, cache)
    return block_reads(block.begin, block.start, block.end, block.budget, cache)
