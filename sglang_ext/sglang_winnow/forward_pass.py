"""What both attention backends do with a forward pass of SGLang's: find its tokens, and write its keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from winnow_kernels.cache import NARROW, Context, LayerCache

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def context_of(forward_batch: ForwardBatch, table: Tensor, pool_slots: int) -> Context:
    """Return where the batch's tokens lie.

    Args:
        forward_batch: of SGLang.
        table: int32 [request slots, positions]; the KV slot of each token of a request.
        pool_slots: slots in the pool.
    """
    longest = int(forward_batch.seq_lens_cpu.max())
    slots = table[forward_batch.req_pool_indices, :longest].long()
    return Context.of(slots, forward_batch.seq_lens.long(), pool_slots)


def write_keys_and_values(
    pool: KVCache, layer: RadixAttention, forward_batch: ForwardBatch, keys: Tensor | None, values: Tensor | None
) -> None:
    """Write a layer's new keys and values to the cache; SGLang passes none where it has written them itself.

    Into a cache of a narrow dtype they go divided by the layer's scales, in place.
    """
    if keys is not None:
        location = KVWriteLoc(forward_batch.out_cache_loc, None)
        pool.set_kv_buffer(layer, location, keys, values, layer.k_scale, layer.v_scale)


def window_of(layer: RadixAttention) -> int | None:
    """Return how many tokens before its own a layer's query sees; None for all."""
    return layer.sliding_window_size if layer.sliding_window_size > -1 else None


def scaled_queries(queries: Tensor, layer: RadixAttention, cache: LayerCache) -> Tensor:
    """Return ``queries`` times what the layer's keys in the cache were divided by."""
    of_keys, _ = _scales_of(layer, cache)
    return queries if of_keys == 1 else queries * of_keys


def scaled_output(output: Tensor, layer: RadixAttention, cache: LayerCache) -> Tensor:
    """Return ``output`` times what the layer's values in the cache were divided by."""
    _, of_values = _scales_of(layer, cache)
    return output if of_values == 1 else output * of_values


def _scales_of(layer: RadixAttention, cache: LayerCache) -> tuple[float, float]:
    """Return what a layer's keys and its values were divided by: the checkpoint's, so a CUDA graph may hold them."""
    if cache.keys.dtype not in NARROW:
        return 1.0, 1.0
    return layer.k_scale_float or 1.0, layer.v_scale_float or 1.0
