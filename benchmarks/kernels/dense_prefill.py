"""Dense prefill as others have written it: what QUOKA's prefill is compared with."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from winnow_kernels.cache import LayerCache

_WORKSPACE_BYTES: Final = 256 << 20
# What an import raises where a library is missing, and what building a kernel raises where that does not work.
_MISSING: Final = (ImportError, RuntimeError, OSError, subprocess.SubprocessError)


@dataclass(frozen=True)
class Chunk:
    """The tokens of a prompt from ``begin`` to ``end``, which are prefilled at once."""

    begin: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class DenseInputs:
    """One layer's prefill of one request.

    Attributes:
        queries: [tokens of the longest chunk, query heads, head dim]; every chunk has the first of them.
        cache: the layer's.
        page_table: int32 [1, pages].
        page_size: tokens in a page.
        scale: of the scores.
        chunks: of the prompt, in order.
    """

    queries: Tensor
    cache: LayerCache
    page_table: Tensor
    page_size: int
    scale: float
    chunks: Sequence[Chunk]

    @property
    def device(self) -> torch.device:
        return self.queries.device

    def paged(self) -> tuple[Tensor, Tensor]:
        """Return keys and values as [pages, page size, KV heads, head dim]."""
        keys, values = (pool.unflatten(0, (-1, self.page_size)) for pool in (self.cache.keys, self.cache.values))
        return keys, values


class DensePrefill(Protocol):
    """Causal attention of each chunk to everything before it."""

    def run(self, chunk: int) -> Tensor:
        """Return the output of a chunk by its number, [tokens, query heads, head dim], in place until the next."""


class FlashInferPrefill:
    """FlashInfer's paged prefill, planned once for each chunk, outside of what is timed."""

    def __init__(self, inputs: DenseInputs, chunks: Sequence[int], backend: str) -> None:
        """Plan for ``chunks``, with FlashInfer's ``backend``, "fa2" or "fa3"."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # noqa: PLC0415  # Takes seconds; needs a GPU.

        self._inputs = inputs
        self._paged = inputs.paged()
        self._output = torch.empty_like(inputs.queries)
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.device)
        self._wrappers = {}
        for number in chunks:
            chunk = inputs.chunks[number]
            pages = -(-chunk.end // inputs.page_size)
            wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
            wrapper.plan(
                torch.tensor([0, chunk.tokens], dtype=torch.int32, device=inputs.device),
                torch.tensor([0, pages], dtype=torch.int32, device=inputs.device),
                inputs.page_table[0, :pages].contiguous(),
                torch.tensor([(chunk.end - 1) % inputs.page_size + 1], dtype=torch.int32, device=inputs.device),
                inputs.queries.shape[1],
                inputs.cache.kv_heads,
                inputs.cache.head_dim,
                inputs.page_size,
                causal=True,
                sm_scale=inputs.scale,
                q_data_type=inputs.queries.dtype,
                kv_data_type=inputs.queries.dtype,
            )
            self._wrappers[number] = wrapper

    def run(self, chunk: int) -> Tensor:
        tokens = self._inputs.chunks[chunk].tokens
        output = self._output[:tokens]
        self._wrappers[chunk].run(self._inputs.queries[:tokens], self._paged, out=output)
        return output


class FlashAttention3Prefill:
    """FlashAttention 3 as SGLang calls it on Hopper, but with larger pages than its default of one token."""

    def __init__(self, inputs: DenseInputs, chunks: Sequence[int]) -> None:
        """
        Raises:
            ImportError: sgl_kernel has no FlashAttention 3 here.
        """
        from sgl_kernel.flash_attn import (  # type: ignore[import-untyped]  # noqa: PLC0415  # Needs a GPU.
            flash_attn_with_kvcache,
        )

        keys, values = inputs.paged()
        self._attend = partial(flash_attn_with_kvcache, k_cache=keys, v_cache=values)
        self._arguments: dict[int, dict[str, Any]] = {}
        for number in chunks:
            chunk = inputs.chunks[number]
            self._arguments[number] = {
                "q": inputs.queries[: chunk.tokens],
                "page_table": inputs.page_table,
                "cache_seqlens": torch.tensor([chunk.end], dtype=torch.int32, device=inputs.device),
                "cu_seqlens_q": torch.tensor([0, chunk.tokens], dtype=torch.int32, device=inputs.device),
                "max_seqlen_q": chunk.tokens,
                "softmax_scale": inputs.scale,
                "causal": True,
            }

    def run(self, chunk: int) -> Tensor:
        output: Tensor = self._attend(**self._arguments[chunk])
        return output


BACKENDS: Final[dict[str, Callable[[DenseInputs, Sequence[int]], DensePrefill]]] = {
    "flashinfer fa2": partial(FlashInferPrefill, backend="fa2"),
    "flashinfer fa3": partial(FlashInferPrefill, backend="fa3"),
    "fa3": FlashAttention3Prefill,
}
"""What there may be to be compared with: makers of what attends in the given chunks."""


def available(inputs: DenseInputs) -> tuple[list[str], dict[str, str]]:
    """Return the names of the backends that work here, and of the others what they raise."""
    working, broken = [], {}
    for name, make in BACKENDS.items():
        try:
            make(inputs, [0]).run(0)
            torch.cuda.synchronize()
            working.append(name)
        except _MISSING as error:
            broken[name] = f"{type(error).__name__}: {error}"[:500]
    return working, broken
