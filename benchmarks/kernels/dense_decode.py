"""Dense decode as others have written it: what every sparse layer is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from winnow_kernels.batch import DecodeBatch
from winnow_kernels.cache import LayerCache

_WORKSPACE_BYTES: Final = 512 << 20


class DenseDecode(Protocol):
    """Attention over whole contexts, all of one length; its output stays in place until the next call."""

    output: Tensor
    """[rows, query heads, head dim]."""

    def call(self, layer: int) -> Callable[[], None]:
        """Return what attends in a layer, counted round and round; a CUDA graph can capture it."""


class FlashInferDecode:
    """FlashInfer's paged decode, with tensor cores."""

    def __init__(self, queries: Tensor, caches: Sequence[LayerCache], batch: DecodeBatch, scale: float) -> None:
        """Plan for the lengths that ``batch`` has now; ``queries`` are [rows, query heads, head dim]."""
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # noqa: PLC0415  # Takes seconds; needs a GPU.

        self.output = torch.empty_like(queries)
        self._queries = queries
        self._paged = [_paged(cache, batch.page_size) for cache in caches]
        rows, query_heads, head_dim = queries.shape
        pages = -(-int(batch.lengths[0]) // batch.page_size)
        indptr = torch.arange(rows + 1, dtype=torch.int32, device=queries.device) * pages
        last = (batch.lengths - 1) % batch.page_size + 1
        indices = batch.page_table[:, :pages].flatten()
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=queries.device),
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.empty_like(indptr),
            paged_kv_indices_buffer=torch.empty_like(indices),
            paged_kv_last_page_len_buffer=torch.empty_like(last),
        )
        self._wrapper.plan(
            indptr, indices, last, query_heads, caches[0].kv_heads, head_dim, batch.page_size,
            q_data_type=queries.dtype, kv_data_type=queries.dtype, sm_scale=scale,
        )  # fmt: skip

    def call(self, layer: int) -> Callable[[], None]:
        paged = self._paged[layer % len(self._paged)]

        def run() -> None:
            self._wrapper.run(self._queries, paged, out=self.output)

        return run


class FlashAttention3Decode:
    """FlashAttention 3 as SGLang calls it on Hopper, but with larger pages than its default of one token."""

    def __init__(self, queries: Tensor, caches: Sequence[LayerCache], batch: DecodeBatch, scale: float) -> None:
        """
        Raises:
            ImportError: sgl_kernel has no FlashAttention 3 here.
        """
        from sgl_kernel.flash_attn import (  # type: ignore[import-untyped]  # noqa: PLC0415  # Needs a GPU.
            flash_attn_with_kvcache,
        )

        self.output = torch.empty_like(queries)
        self._paged = [_paged(cache, batch.page_size) for cache in caches]
        self._attend = flash_attn_with_kvcache
        self._arguments: dict[str, Any] = {
            "q": queries,
            "page_table": batch.page_table,
            "cache_seqlens": batch.lengths,
            "cu_seqlens_q": torch.arange(len(queries) + 1, dtype=torch.int32, device=queries.device),
            "max_seqlen_q": 1,
            "softmax_scale": scale,
            "causal": True,
            "num_splits": 0,
        }

    def call(self, layer: int) -> Callable[[], None]:
        keys, values = self._paged[layer % len(self._paged)]

        def run() -> None:
            self.output = self._attend(k_cache=keys, v_cache=values, **self._arguments)

        return run


def dense_decodes(
    queries: Tensor, caches: Sequence[LayerCache], batch: DecodeBatch, scale: float
) -> dict[str, DenseDecode]:
    """Return what there is here to be compared with, by name; FlashInfer always."""
    decodes: dict[str, DenseDecode] = {"flashinfer": FlashInferDecode(queries, caches, batch, scale)}
    with contextlib.suppress(ImportError):
        decodes["fa3"] = FlashAttention3Decode(queries, caches, batch, scale)
    return decodes


def _paged(cache: LayerCache, page_size: int) -> tuple[Tensor, Tensor]:
    return cache.keys.unflatten(0, (-1, page_size)), cache.values.unflatten(0, (-1, page_size))
