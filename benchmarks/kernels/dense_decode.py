"""Dense decode as others have written it: what every sparse layer is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from winnow_kernels.batch import DecodeBatch
from winnow_kernels.cache import NARROW, LayerCache

_WORKSPACE_BYTES: Final = 512 << 20
# SGLang's default.
_TRITON_SPLITS: Final = 8


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
            q_data_type=queries.dtype, kv_data_type=caches[0].keys.dtype, sm_scale=scale,
        )  # fmt: skip

    def call(self, layer: int) -> Callable[[], None]:
        paged = self._paged[layer % len(self._paged)]

        def run() -> None:
            self._wrapper.run(self._queries, paged, out=self.output)

        return run


class FlashAttention3Decode:
    """FlashAttention 3 as SGLang calls it on Hopper, but with larger pages than its default of one token.

    With keys in 8 bits its queries have 8 bits, too; narrowing them is a part of each call.
    """

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
        self._queries = queries
        self._arguments: dict[str, Any] = {
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
            queries = self._queries.to(keys.dtype)
            self.output = self._attend(q=queries, k_cache=keys, v_cache=values, **self._arguments)

        return run


class TritonDecode:
    """SGLang's Triton kernels, as its backend ``triton`` launches them by default."""

    def __init__(self, queries: Tensor, caches: Sequence[LayerCache], batch: DecodeBatch, scale: float) -> None:
        """Split the contexts as they are in ``batch`` now; ``queries`` are [rows, query heads, head dim]."""
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd  # noqa: PLC0415  # In releases.
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton  # noqa: PLC0415

        self.output = torch.empty_like(queries)
        self._queries, self._caches, self._scale = queries, caches, scale
        self._attend = decode_attention_fwd
        rows, query_heads, head_dim = queries.shape
        device, length = queries.device, int(batch.lengths[0])
        places = torch.arange(length, device=device)
        slots = batch.page_table[:, places // batch.page_size].long() * batch.page_size + places % batch.page_size
        splits = torch.empty(rows, dtype=torch.int32, device=device)
        get_num_kv_splits_triton[(1,)](
            splits,
            batch.lengths,
            rows,
            1,
            query_heads,
            caches[0].kv_heads,
            _TRITON_SPLITS,
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1,
            MAX_NUM_SEQ=256,
        )
        parts = (rows, query_heads, _TRITON_SPLITS)
        self._split_contexts = (
            torch.arange(rows + 1, dtype=torch.int32, device=device) * length,
            slots.flatten(),
            torch.empty(*parts, head_dim, dtype=torch.float32, device=device),
            torch.empty(parts, dtype=torch.float32, device=device),
            splits,
        )

    def call(self, layer: int) -> Callable[[], None]:
        cache = self._caches[layer % len(self._caches)]

        def run() -> None:
            self._attend(
                self._queries,
                cache.keys,
                cache.values,
                self.output,
                *self._split_contexts,
                _TRITON_SPLITS,
                self._scale,
                1.0,
                1.0,
            )

        return run


def dense_decodes(
    queries: Tensor, caches: Sequence[LayerCache], batch: DecodeBatch, scale: float
) -> dict[str, DenseDecode]:
    """Return what there is here to be compared with, by name; FlashInfer always, Triton where keys are narrow."""
    decodes: dict[str, DenseDecode] = {"flashinfer": FlashInferDecode(queries, caches, batch, scale)}
    with contextlib.suppress(ImportError):
        decodes["fa3"] = FlashAttention3Decode(queries, caches, batch, scale)
    if caches[0].keys.dtype in NARROW:
        decodes["triton"] = TritonDecode(queries, caches, batch, scale)
    return decodes


def _paged(cache: LayerCache, page_size: int) -> tuple[Tensor, Tensor]:
    return cache.keys.unflatten(0, (-1, page_size)), cache.values.unflatten(0, (-1, page_size))
