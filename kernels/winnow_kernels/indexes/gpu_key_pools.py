"""The keys of all layers, for kernels that work on many layers in one launch.

Each layer's pool is an allocation of its own, so a kernel gets a table of their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.cache import NARROW, LayerCache
from winnow_kernels.kernel_arguments import Constant, Number, Pointer

_TYPES: Final = (torch.bfloat16, torch.float16, torch.float32, *NARROW)
_ALIGNMENT: Final = 16


class Pools(NamedTuple):
    """``KeyPools``, for a kernel; ``layer_keys`` takes the type of all layers' keys from the ``first`` layer's."""

    addresses: Pointer
    first: Pointer
    slot_stride: Number
    head_stride: Number
    kv_heads: Constant
    head_dim: Constant


@dataclass(frozen=True, eq=False)
class KeyPools:
    """Every layer's keys, [slots, KV heads, head dim], all of one layout.

    Attributes:
        caches: of the layers; they keep the memory alive that the addresses name.
        addresses: int64 [layers], on the keys' device.
    """

    caches: Sequence[LayerCache]
    addresses: Tensor

    @classmethod
    def of(cls, caches: Sequence[LayerCache]) -> KeyPools:
        """Return the pools of ``caches``.

        Raises:
            ValueError: they differ in dtype, shape or strides, or a layout or a dtype is not one that kernels read.
        """
        first = caches[0].keys
        if first.dtype not in _TYPES:
            raise ValueError(f"caches: keys must be of {', '.join(map(str, _TYPES))}; they are of {first.dtype}")
        if first.stride(2) != 1:
            raise ValueError("caches: the numbers of a key must lie next to each other")
        for keys in (cache.keys for cache in caches):
            if (keys.dtype, keys.shape, keys.stride()) != (first.dtype, first.shape, first.stride()):
                raise ValueError("caches: all layers must have keys of one dtype, shape and layout")
            if keys.data_ptr() % _ALIGNMENT:
                raise ValueError(f"caches: keys must begin at a multiple of {_ALIGNMENT} bytes")
        addresses = torch.tensor([cache.keys.data_ptr() for cache in caches], device=first.device)
        return cls(caches, addresses)

    @property
    def layers(self) -> int:
        return len(self.caches)

    @property
    def kv_heads(self) -> int:
        return self.caches[0].kv_heads

    @property
    def head_dim(self) -> int:
        return self.caches[0].head_dim

    @property
    def arguments(self) -> Pools:
        """What a kernel takes."""
        return Pools(
            self.addresses, self.first, *self.strides, tl.constexpr(self.kv_heads), tl.constexpr(self.head_dim)
        )

    @property
    def strides(self) -> tuple[int, int]:
        """Numbers from one slot to the next, and from one head to the next."""
        slot, head, _ = self.caches[0].keys.stride()
        return slot, head

    @property
    def first(self) -> Tensor:
        """The first layer's keys: a kernel takes the type of all layers' from them."""
        return self.caches[0].keys


@triton.jit  # type: ignore[untyped-decorator]
def layer_keys(addresses_ptr: tl.tensor, first_ptr: tl.tensor, layer: tl.tensor) -> tl.tensor:
    """Return a pointer to the keys of ``layer``, of the type of ``first_ptr``."""
    # The compiler cannot see how an address from memory is aligned, and would load number by number.
    return tl.multiple_of(tl.load(addresses_ptr + layer).to(first_ptr.dtype), 16)
