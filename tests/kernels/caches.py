"""Random KV caches and contexts whose slots are scattered over the pool, for tests of the torch references."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.softmax import PLAIN, Softmax

CAP = 1.5
SOFTMAXES = ("plain", "cap", "sinks", "cap and sinks")
"""Kinds for ``random_softmax``."""


def random_cache(
    slots: int, kv_heads: int, head_dim: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> LayerCache:
    generator = torch.Generator().manual_seed(seed)
    shape = (slots, kv_heads, head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return LayerCache(keys, values)


def scattered_context(lengths: Sequence[int], slots: int, page_size: int = 16, seed: int = 0) -> Context:
    """Contexts whose pages are distinct and in random order; page 0 stays unused, as SGLang leaves it."""
    generator = torch.Generator().manual_seed(seed)
    pages = (1 + torch.randperm(slots // page_size - 1, generator=generator)).tolist()
    table = torch.full((len(lengths), max(lengths)), slots, dtype=torch.int64)
    for request, length in enumerate(lengths):
        own = [pages.pop() for _ in range(-(-length // page_size))]
        of_request = torch.tensor(own)[:, None] * page_size + torch.arange(page_size)
        table[request, :length] = of_request.flatten()[:length]
    return Context(table, torch.tensor(lengths))


def random_queries(requests: int, heads: int, head_dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(requests, heads, head_dim, generator=torch.Generator().manual_seed(seed))


def random_softmax(kind: str, query_heads: int, seed: int = 0) -> Softmax:
    """A softmax with a cap that scores of one or two reach, and sinks that take next to nothing or most."""
    if kind == "plain":
        return PLAIN
    sink_logits = 4 * torch.randn(query_heads, generator=torch.Generator().manual_seed(seed)) + 4
    return Softmax(CAP if "cap" in kind else None, sink_logits if "sinks" in kind else None)


def bytes_allocated(owner: object) -> int:
    """Bytes of an object's tensors; of which some may be parts of others."""
    tensors = (value for value in vars(owner).values() if isinstance(value, torch.Tensor))
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
