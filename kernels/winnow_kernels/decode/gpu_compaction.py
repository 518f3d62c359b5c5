"""Moving what a request keeps of its prompt into few slots, on a GPU: one launch for many layers, or all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from winnow_kernels.cache import LayerCache
from winnow_kernels.decode.compaction import arranged, room_for
from winnow_kernels.host_tensors import to_device

_BLOCK: Final = 32
# That are put in order at once, for which several times as many numbers of 64 bits are needed.
_MAX_POSITIONS: Final = 2**21
# Numbers are moved as they are stored, whatever they mean.
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Compaction:
    """Moves what requests keep in the layers of a KV cache. It waits for nothing on the device, and is not captured."""

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        """``caches`` are of the layers.

        Raises:
            ValueError: they differ in dtype, shape or strides, or the numbers of a key do not lie next to each other.
        """
        first = caches[0].keys
        pools = [half for cache in caches for half in (cache.keys, cache.values)]
        if len({(pool.dtype, pool.shape, pool.stride()) for pool in pools}) != 1:
            raise ValueError("caches: all layers must have keys and values of one dtype, shape and layout")
        if first.stride(2) != 1:
            raise ValueError("caches: the numbers of a key must lie next to each other")
        # They keep the memory alive that the addresses name.
        self._caches = caches
        self._addresses = torch.tensor([pool.data_ptr() for pool in pools], device=first.device)
        self._first = first.view(_BITS[first.element_size()])

    def move(self, kept: Mapping[int, Tensor], prompt: Tensor, begin: int) -> dict[int, Tensor]:
        """Move what is kept of a prompt, as ``compact``; ``kept`` has all layers."""
        layers, most = len(self._caches), room_for(kept)
        at_once = max(1, _MAX_POSITIONS // (most * self._first.shape[1]))
        places: dict[int, Tensor] = {}
        for start in range(0, layers, at_once):
            some = range(start, min(start + at_once, layers))
            places |= self._move({layer: kept[layer] for layer in some}, prompt, begin)
        return places

    def _move(self, kept: Mapping[int, Tensor], prompt: Tensor, begin: int) -> dict[int, Tensor]:
        layers = list(kept)
        # As wide as the layer that keeps most.
        positions = pad_sequence([own.T for own in kept.values()], batch_first=True, padding_value=-1).mT
        moved, places = arranged(positions, begin, len(prompt))
        counts = [own.shape[1] for own in kept.values()]
        first = self._first
        _, kv_heads, head_dim = first.shape
        _move_kernel[(len(layers), kv_heads, 2)](
            self._addresses[2 * layers[0] :],
            first,
            moved.contiguous(),
            to_device(torch.tensor(counts), first.device),
            prompt,
            begin,
            moved.shape[2],
            first.stride(0),
            first.stride(1),
            head_dim=head_dim,
            dim_block=triton.next_power_of_2(head_dim),
            block=_BLOCK,
        )
        return {layer: places[place, :, : counts[place]] for place, layer in enumerate(layers)}


@triton.jit(do_not_specialize=["begin", "width"])  # type: ignore[untyped-decorator]
def _move_kernel(
    addresses_ptr: tl.tensor,
    first_ptr: tl.tensor,
    moved_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    prompt_ptr: tl.tensor,
    begin: tl.tensor,
    width: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Move the keys, or values, that a KV head of a layer keeps. Grid: layers × KV heads × these two.

    ``moved_ptr`` has [layers, KV heads, width] positions in the order of ``arranged``: in it, no token is moved to
    where one lies that comes later, so that the blocks of a program may follow each other without room between.
    """
    layer, head, half = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # The compiler cannot see how an address from memory is aligned, and would load number by number.
    vectors_ptr = tl.multiple_of(tl.load(addresses_ptr + 2 * layer + half).to(first_ptr.dtype), 16)
    vectors_ptr += head * head_stride
    own_ptr = moved_ptr + (layer * tl.num_programs(1) + head).to(tl.int64) * width
    count = tl.load(counts_ptr + layer)
    dim = tl.arange(0, dim_block)
    for start in range(0, count, block):
        index = start + tl.arange(0, block)
        is_token = index < count
        source = tl.load(prompt_ptr + tl.load(own_ptr + index, mask=is_token, other=0), mask=is_token, other=0)
        target = tl.load(prompt_ptr + begin + index, mask=is_token, other=0)
        is_number = is_token[:, None] & (dim < head_dim)[None, :]
        numbers = tl.load(vectors_ptr + source[:, None] * slot_stride + dim[None, :], mask=is_number)
        # Within a block a token may be moved to where another lies: all are loaded before one is stored.
        tl.debug_barrier()
        tl.store(vectors_ptr + target[:, None] * slot_stride + dim[None, :], numbers, mask=is_number)
