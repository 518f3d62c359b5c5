"""Codes of keys, as what they give back: what a key looks like to whoever scores it by its code.

A score is a product with a query, so an estimate of the key says all that a code says. Keys lie in blocks of
neighbouring tokens; what is left at the end is a shorter block. Shapes are [tokens, KV heads, head dim].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from benchmarks.fidelity.captured_attention import Moments
from winnow_kernels.indexes.key_codes import BLOCK, MEAN_BITS, rotation, rounded

_FACTOR_BITS: Final = 16
_TINY: Final = torch.finfo(torch.float32).tiny
_SMALLEST: Final = 1e-6
"""Of a covariance's directions, beside the mean one: smaller ones count as this."""

Estimate = Callable[[Tensor], Tensor]
"""Makes of keys what their codes tell of them, both float32 [tokens, KV heads, head dim]."""


@dataclass(frozen=True)
class Code:
    """One way to write a key in few bits.

    Attributes:
        name: what tables call it.
        bits: of a channel.
        block: tokens that share steps or a mean.
        is_balanced: whether it is written in coordinates that other text says are better.
    """

    name: str
    bits: int
    block: int
    is_balanced: bool = False

    def estimate(self, layer: int, moments: Moments) -> Estimate:
        """Return what makes the estimates of a layer's keys; ``moments`` are of other text."""
        if self.name == PER_CHANNEL:
            return lambda keys: per_channel(keys, self.bits, self.block)
        if not self.is_balanced:
            return lambda keys: rotated(keys, self.bits, self.block)
        there = balancing(moments.residuals[layer], moments.queries[layer])
        back = torch.linalg.inv(there)
        return lambda keys: _through(rotated(_through(keys, there), self.bits, self.block), back)

    def bits_of_channel(self, head_dim: int) -> float:
        """Return the bits of a key's channel with its part of what a token and a block have, without padding."""
        if self.name == PER_CHANNEL:
            return self.bits + 2 * _FACTOR_BITS / self.block
        # The mean's factor is in the signs of the tokens' factors.
        return self.bits + _FACTOR_BITS / head_dim + MEAN_BITS / self.block


PER_CHANNEL: Final = "steps of each channel"
ROTATED: Final = "rotated residuals"
CODES: Final = (
    Code(PER_CHANNEL, 1, 64),
    *(Code(PER_CHANNEL, 2, block) for block in (16, 32, 64, 128)),
    Code(PER_CHANNEL, 3, 64),
    *(Code(ROTATED, bits, block) for bits in (1, 2, 3) for block in (16, 32, 64, 128)),
    Code(ROTATED, 4, 16),
    Code(f"{ROTATED}, covariances balanced", 2, 16, is_balanced=True),
)
SHIPPED: Final = tuple(Code(ROTATED, bits, BLOCK) for bits in (2, 3, 4))
"""Those of ``KeyCodes``."""


def per_channel(keys: Tensor, bits: int, block: int) -> Tensor:
    """Return estimates from equal steps between each channel's least and greatest number in a block.

    A number becomes the middle of its step, which loses less than steps whose ends are the block's own.
    """

    def estimated(own: Tensor) -> Tensor:
        least, greatest = own.amin(1, keepdim=True), own.amax(1, keepdim=True)
        step = ((greatest - least) / 2**bits).half().float()
        least = least.half().float()
        codes = ((own - least) / step.clamp_min(_TINY)).floor_().clamp_(0, 2**bits - 1)
        middles: Tensor = least + (codes + 0.5) * step
        return middles

    return _by_blocks(keys, block, estimated)


def rotated(keys: Tensor, bits: int, block: int) -> Tensor:
    """Return estimates from what keys differ by from their block's mean, rotated, with an unbiased factor.

    With blocks of 16 and 2 bits or more this is ``KeyCodes``.
    """
    head_dim = keys.shape[-1]
    turn = rotation(head_dim)

    def estimated(own: Tensor) -> Tensor:
        turned = own @ turn.T
        values, factors = rounded(turned.mean(1, keepdim=True), MEAN_BITS)
        means = values * factors.half().float()
        values, factors = _rounded(turned - means, bits)
        back: Tensor = (means + values * factors.half().float()) @ turn / head_dim
        return back

    return _by_blocks(keys, block, estimated)


def balancing(residuals: Tensor, queries: Tensor) -> Tensor:
    """Return what keys are multiplied with so that the error of their scores is least.

    That error is in proportion to the product of two traces: of the covariance of what is rounded, and of that of the
    queries in the same coordinates. G^½ with G = R^-½ (R^½ Q R^½)^½ R^-½ makes the product least.

    Args:
        residuals: float32 [KV heads, head dim, head dim]; their second moments, R.
        queries: the same of queries, Q.

    Returns:
        float32, same shape; symmetric. Queries are multiplied with its inverse.
    """
    root = _power(residuals.double(), 0.5)
    inverse = torch.linalg.inv(root)
    middle = _power(root @ queries.double() @ root, 0.5)
    return _power(inverse @ middle @ inverse, 0.5).float()


def _power(matrices: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
    values = torch.maximum(values, values.mean(-1, keepdim=True) * _SMALLEST)
    power: Tensor = (vectors * values.pow(exponent)[..., None, :]) @ vectors.mT
    return power


def _through(keys: Tensor, matrices: Tensor) -> Tensor:
    return (keys.transpose(0, 1) @ matrices).transpose(0, 1)


def _rounded(vectors: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return what ``rounded`` does, which knows no single bit: that of a number is its sign."""
    if bits > 1:
        return rounded(vectors, bits)
    values = torch.ones_like(vectors).copysign(vectors)
    squares = vectors.square().sum(-1, keepdim=True)
    return values, squares / vectors.abs().sum(-1, keepdim=True).clamp_min(_TINY)


def _by_blocks(keys: Tensor, block: int, estimated: Callable[[Tensor], Tensor]) -> Tensor:
    whole = len(keys) // block * block
    parts = [keys[:whole].unflatten(0, (-1, block))] if whole else []
    if whole < len(keys):
        parts.append(keys[whole:][None])
    return torch.cat([estimated(part).flatten(0, 1) for part in parts])
