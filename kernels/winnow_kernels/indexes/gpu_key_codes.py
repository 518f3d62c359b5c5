"""Building the codes of keys (``indexes.key_codes``): one launch for all layers.

A program rounds the keys of one page and head in one layer. What must be done is reading the keys, half of the cache,
and multiplying each with the rotation: 2 × head dim² operations, on matrix units where these hold the rotation exactly.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow_kernels.indexes.gpu_builds import Entries
from winnow_kernels.indexes.gpu_key_pools import KeyPools, Pools, layer_keys
from winnow_kernels.kernel_arguments import Constant, Number, Pointer

_SMALLEST: Final = tl.constexpr(torch.finfo(torch.float32).tiny)
_MAX_FACTOR: Final = tl.constexpr(torch.finfo(torch.float16).max)
_BLOCK: Final = tl.constexpr(16)
# Of a float32 product; no product takes fewer.
_DIMS_IN_REGISTERS: Final = tl.constexpr(16)


class Codes(NamedTuple):
    """The tensors of ``KeyCodes``, of all layers or of one, and how they are packed.

    From a block to the next it is ``block_bytes`` in each of them: they are parts of one.
    """

    codes: Pointer
    factors: Pointer
    means: Pointer
    layer_blocks: Number
    bits: Constant
    head_dim: Constant
    kv_heads: Constant
    block_bytes: Constant


class Coding(NamedTuple):
    """The tensors of ``KeyCodes`` in all layers, what keys are rotated by, and what numbers are rounded to.

    A mean's and a residual's step is what it says, times their length.
    """

    codes: Pointer
    factors: Pointer
    means: Pointer
    layer_blocks: Number
    rotation: Pointer
    mean_step: Number
    residual_step: Number
    bits: Constant
    block_bytes: Constant
    page_size: Constant
    dim_block: Constant


def entries_of(pools: KeyPools, codes: Codes, rotation: Tensor, steps: tuple[float, float], page_size: int) -> Entries:
    """Return the codes of all layers' pages, as Triton builds them.

    Args:
        pools: every layer's keys.
        codes: of all layers.
        rotation: [head dim, head dim]; rows of ±1 in the keys' dtype, or of the length √head dim in float32.
        steps: what a mean and a residual are rounded to, for vectors of length 1.
        page_size: tokens in a page.
    """
    dim_block = max(16, triton.next_power_of_2(pools.head_dim))
    sizes = (codes.bits, codes.block_bytes, tl.constexpr(page_size), tl.constexpr(dim_block))
    return Entries(pools, Coding(*codes[:4], rotation, *steps, *sizes), _write_codes, pools.kv_heads)


@triton.jit  # type: ignore[untyped-decorator]
def factor_of_mean(signed: tl.tensor) -> tl.tensor:
    """Return the factors of blocks' means, float32 [blocks], that are the signs of float16 [blocks, 16]."""
    bits = signed.to(tl.int16, bitcast=True).to(tl.int32) >> 15 & 1
    shifted = bits << tl.arange(0, _BLOCK)[None, :]
    return tl.sum(shifted, 1).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(
    vectors: tl.tensor, step: tl.tensor, bits: tl.constexpr, is_channel: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the codes of vectors, [n, channels], and their factors, [n] (``key_codes.rounded``)."""
    square = tl.sum(vectors * vectors, 1)
    steps = tl.maximum(tl.sqrt_rn(square) * step, _SMALLEST)
    half: tl.constexpr = 2 ** (bits - 1)
    codes = tl.minimum(tl.maximum(tl.floor(tl.div_rn(vectors, steps[:, None])), -half), half - 1)
    product = tl.sum(tl.where(is_channel, vectors * (codes * 2 + 1), 0.0), 1)
    return codes.to(tl.int32) + half, tl.div_rn(square, tl.maximum(product, _SMALLEST))


@triton.jit  # type: ignore[untyped-decorator]
def _store_packed(
    pointer: tl.tensor, codes: tl.tensor, bits: tl.constexpr, of_byte: tl.constexpr, is_stored: tl.tensor
) -> None:
    """Store codes, [n, channels], of 1, 2 or 4 bits, at pointers [n, channels ÷ of_byte]."""
    grouped = tl.reshape(codes, [codes.shape[0], codes.shape[1] // of_byte, of_byte])
    shifts = tl.arange(0, of_byte) * bits
    tl.store(pointer, tl.sum(grouped << shifts[None, None, :], 2).to(tl.uint8), mask=is_stored)


@triton.jit  # type: ignore[untyped-decorator]
def _turned(
    slots_ptr: tl.tensor, own: tl.tensor, turned: tl.tensor, codes: Coding, head_dim: tl.constexpr
) -> tl.tensor:
    """Return ``turned``, float32 [keys, dim block], and what a key's ``own`` numbers add to the rotated key."""
    dim = tl.arange(0, codes.dim_block)
    is_own = own < head_dim
    vectors = tl.load(slots_ptr + own[None, :], mask=is_own[None, :], other=0.0)
    turn_ptr = codes.rotation + dim[None, :] * head_dim + own[:, None]
    turn = tl.load(turn_ptr, mask=is_own[:, None] & (dim < head_dim)[None, :], other=0.0)
    return tl.dot(vectors.to(turn.dtype), turn, turned, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def _write_codes(pools: Pools, codes: Coding, page: tl.tensor) -> None:
    layer, head = tl.program_id(1), tl.program_id(2)
    page_size: tl.constexpr = codes.page_size
    dim_block: tl.constexpr = codes.dim_block
    dim = tl.arange(0, dim_block)
    head_dim: tl.constexpr = pools.head_dim
    is_dim = dim < head_dim
    keys_ptr = layer_keys(pools.addresses, pools.first, layer) + head * pools.head_stride
    blocks: tl.constexpr = page_size // _BLOCK
    slot = page.to(tl.int64) * page_size + tl.arange(0, page_size)
    slots_ptr = keys_ptr + slot[:, None] * pools.slot_stride
    turned = tl.zeros([page_size, dim_block], tl.float32)
    if codes.rotation.dtype.element_ty == tl.float32:
        # Matrix units do not multiply these exactly: what does holds its operands in registers.
        for start in range(0, head_dim, _DIMS_IN_REGISTERS):
            turned = _turned(slots_ptr, start + tl.arange(0, _DIMS_IN_REGISTERS), turned, codes, head_dim)
    else:
        turned = _turned(slots_ptr, dim, turned, codes, head_dim)
    by_block = tl.reshape(turned, [blocks, _BLOCK, dim_block])
    first_block = layer.to(tl.int64) * codes.layer_blocks + page.to(tl.int64) * blocks
    block = (first_block + tl.arange(0, blocks)) * pools.kv_heads + head
    means = tl.sum(by_block, 1) * (1.0 / _BLOCK)
    mean_codes, mean_factors = _rounded(means, codes.mean_step, 4, is_dim[None, :])
    narrow_factors = tl.minimum(mean_factors, _MAX_FACTOR).to(tl.float16)
    block_bytes: tl.constexpr = codes.block_bytes
    half_dim = tl.arange(0, dim_block // 2)
    of_mean: tl.constexpr = head_dim // 2
    _store_packed(
        codes.means + block[:, None] * block_bytes + half_dim[None, :], mean_codes, 4, 2, (half_dim < of_mean)[None, :]
    )
    rounded_means = (mean_codes * 2 - 15).to(tl.float32) * narrow_factors.to(tl.float32)[:, None]
    rounded_means = tl.where(is_dim[None, :], rounded_means, 0.0)
    residuals = tl.reshape(by_block - rounded_means[:, None, :], [page_size, dim_block])
    bits: tl.constexpr = codes.bits
    key_codes, factors = _rounded(residuals, codes.residual_step, bits, is_dim[None, :])
    in_page = tl.arange(0, page_size)
    own_block = (first_block + in_page // _BLOCK) * pools.kv_heads + head
    in_block = in_page % _BLOCK
    factors_ptr = codes.factors + own_block * (block_bytes // 2) + in_block
    signs = narrow_factors.to(tl.int16, bitcast=True)[:, None] >> tl.arange(0, _BLOCK)[None, :] & 1
    sign = tl.reshape(signs, [page_size])
    factors = tl.minimum(factors, _MAX_FACTOR).to(tl.float16).to(tl.int16, bitcast=True) | (sign << 15)
    tl.store(factors_ptr, factors.to(tl.int16).to(tl.float16, bitcast=True))
    own_ptr = codes.codes + (own_block * block_bytes + in_block * (head_dim * bits // 8))[:, None]
    if bits == 4:
        _store_packed(own_ptr + half_dim[None, :], key_codes, 4, 2, (half_dim < head_dim // 2)[None, :])
    else:
        quarter = tl.arange(0, dim_block // 4)
        is_quarter = (quarter < head_dim // 4)[None, :]
        _store_packed(own_ptr + quarter[None, :], key_codes >> (bits - 2), 2, 4, is_quarter)
        if bits == 3:
            eighth = tl.arange(0, dim_block // 8)
            low_ptr = own_ptr + head_dim // 4 + eighth[None, :]
            _store_packed(low_ptr, key_codes & 1, 1, 8, (eighth < head_dim // 8)[None, :])
