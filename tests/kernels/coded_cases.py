"""Requests whose tokens are chosen by low-bit codes of their keys, for tests of the policies that do so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.attention_float64 import scores_of_head
from tests.kernels.caches import random_cache, random_queries, scattered_context
from tests.kernels.coded_float64 import Head, kept_positions
from tests.kernels.parameters import termination_at
from winnow_kernels.attend.early_termination import Termination
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.indexes.key_codes import KeyCodes, RoundedQueries
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.softmax import capped

CPU = torch.device("cpu")
SLOTS = 4096
NEVER = [termination_at(0.0, 0.0, 1)]
"""What puts tokens in order and never comes to stop."""


def never(requests: int) -> Termination:
    termination = Termination.of(NEVER * requests, CPU)
    assert termination is not None
    return termination


@dataclass(frozen=True)
class Case:
    """Requests of a pool.

    Attributes:
        cache: of the layer.
        context: of the requests.
        codes: of the pool's keys.
    """

    cache: LayerCache
    context: Context
    codes: KeyCodes

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        kv_heads: int = 2,
        head_dim: int = 32,
        bits: int = 2,
        page_size: int = 16,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Case:
        cache = random_cache(SLOTS, kv_heads, head_dim, seed, dtype)
        codes = KeyCodes([cache], PageGenerations(SLOTS, page_size, CPU), bits=bits)
        return cls(cache, scattered_context(lengths, SLOTS, page_size, seed), codes)

    @property
    def scale(self) -> float:
        return self.cache.head_dim**-0.5

    def queries(self, group: int, sharpness: float = 1.0, seed: int = 0) -> Tensor:
        heads = self.cache.kv_heads * group
        return sharpness * random_queries(self.context.requests, heads, self.cache.head_dim, seed)

    def head(self, queries: Tensor, request: int, kv_head: int, sinks: int) -> Head:
        """Return what is known of a KV head's attention; its codes have been built."""
        page_size = self.codes.generations.page_size
        length = int(self.context.lengths[request])
        slots = self.context.slots[request, :length]
        kept = kept_positions(length, sinks, page_size)
        grouped, cap = queries.float().unflatten(1, (self.cache.kv_heads, -1))[request], self.cache.softmax.cap
        exact = scores_of_head(grouped[kv_head], self.cache.keys[slots[kept], kv_head], self.scale, cap) / math.log(2)
        pages = slots[: (length - 64) // page_size * page_size : page_size] // page_size
        scores = self.codes.scores(0, RoundedQueries.of(grouped, self.scale), self.codes.blocks_of(pages))
        others = sorted(set(range(length)) - set(kept))
        of_head = scores[kv_head][:, others] if others else scores[kv_head][:, :0]
        return Head(length, kept, exact.tolist(), capped(of_head, cap, 1 / math.log(2)).tolist())
