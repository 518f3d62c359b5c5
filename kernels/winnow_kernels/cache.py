"""The KV cache of a layer, and where in it the tokens of a batch's requests lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from winnow_kernels.softmax import PLAIN, Softmax

NARROW: Final = (torch.float8_e4m3fn,)
"""Dtypes that are stored and not computed with: torch and tensor cores' kernels widen them first."""


def widened_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype``, or bfloat16, which holds all numbers of a narrow one, in place of that."""
    return torch.bfloat16 if dtype in NARROW else dtype


def widened(vectors: Tensor) -> Tensor:
    """Return ``vectors`` in a dtype that torch computes with: those of a narrow one as the same numbers in bfloat16."""
    return vectors.to(widened_dtype(vectors.dtype))


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's KV cache. A slot holds one token; ``page_size`` slots in a row are a page.

    What is stored in 8 bits is divided by a scale of the layer before: whoever attends multiplies queries by that of
    keys, and outputs by that of values. Nothing else knows of scales.

    Attributes:
        keys: [slots, KV heads, head dim], rotated, of the server's KV dtype.
        values: [slots, KV heads, head dim].
        windowed: whether the layer has a sliding window: policies do not act there, and indexes leave it out.
        softmax: what the layer's softmax has beside tokens' scores.
    """

    keys: Tensor
    values: Tensor
    windowed: bool = field(default=False, kw_only=True)
    softmax: Softmax = field(default=PLAIN, kw_only=True)

    @property
    def slots(self) -> int:
        return self.keys.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[2]

    @property
    def vector_bytes(self) -> int:
        """Bytes of one key, or value, of one head."""
        return self.head_dim * self.keys.element_size()


@dataclass(frozen=True, eq=False)
class Context:
    """The contexts of a batch's requests, the same in every layer of a step.

    Attributes:
        slots: int64 [requests, longest]; the KV slot of each token by its position. Beyond a request's length the
            number of slots in the pool, which no gather can read.
        lengths: int64 [requests]; tokens in the context, in decode with the one that is being decoded.
    """

    slots: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, table: Tensor, lengths: Tensor, pool_slots: int) -> Context:
        """Return the contexts whose tokens lie at the first ``lengths`` of each row of ``table``.

        Args:
            table: int64 [requests, longest]; beyond a request's length any number.
            lengths: int64 [requests].
            pool_slots: slots in the pool.
        """
        inside = torch.arange(table.shape[1], device=table.device) < lengths[:, None]
        return cls(table.where(inside, pool_slots), lengths)

    @property
    def requests(self) -> int:
        return self.slots.shape[0]

    @property
    def longest(self) -> int:
        return self.slots.shape[1]

    @property
    def device(self) -> torch.device:
        return self.slots.device

    @cached_property
    def positions(self) -> Tensor:
        """int64 [longest]: the numbers from 0 on."""
        return torch.arange(self.longest, device=self.device)

    @cached_property
    def inside(self) -> Tensor:
        """Bool [requests, longest]: which positions hold a token."""
        return self.positions < self.lengths[:, None]

    def slots_at(self, positions: Tensor) -> Tensor:
        """Return the slots at ``positions``, int64 [requests, …], as int64 of the same shape."""
        return self.slots.gather(1, positions.flatten(1)).view_as(positions)

    def rows(self, indices: list[int]) -> Context:
        """Return the contexts of some of the requests, as wide as the longest of them."""
        lengths = self.lengths[indices]
        return Context(self.slots[indices, : int(lengths.max())], lengths)
