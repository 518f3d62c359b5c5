"""Low-bit codes of keys, one number at a time and in float64, straight from their definition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from winnow_kernels.indexes.key_codes import rotation

Vector = NDArray[np.float64]

STEPS = {2: 0.9957, 3: 0.5860, 4: 0.3352}


def rounded(vector: Vector, bits: int) -> tuple[Vector, float]:
    """The odd number next to each channel, in half steps, and the factor that makes a product with them unbiased."""
    norm = math.sqrt(math.fsum(x * x for x in vector))
    if norm == 0:
        return np.ones(len(vector)), 0.0
    step = norm * STEPS[bits] / math.sqrt(len(vector))
    odd = list(range(1 - 2**bits, 2**bits, 2))
    values = np.array([min(odd, key=lambda value: abs(x - value * step / 2)) for x in vector], dtype=np.float64)
    return values, norm * norm / math.fsum(x * value for x, value in zip(vector, values, strict=True))


def block_of(keys: Vector, bits: int) -> tuple[Vector, float, list[Vector], list[float]]:
    """What a block of keys, [16, head dim], is known by: its mean's values and factor, its keys' values and factors."""
    rotated = keys @ rotation(keys.shape[1]).double().numpy().T
    mean, mean_factor = rounded(rotated.mean(0), 4)
    mean_factor = float(np.float16(mean_factor))
    residuals = [rounded(key - mean * mean_factor, bits) for key in rotated]
    return mean, mean_factor, [values for values, _ in residuals], [float(np.float16(own)) for _, own in residuals]


def scores(keys: Vector, queries: Vector, bits: int, scale: float) -> Vector:
    """What the keys of a block, [16, head dim], are predicted to score, to base 2, for queries, [n, head dim]."""
    mean, mean_factor, values, factors = block_of(keys, bits)
    predicted = []
    for query in queries:
        levels, step = levels_of(query)
        offset = mean_factor * float(levels @ mean)
        products = [offset + own * float(levels @ v) for v, own in zip(values, factors, strict=True)]
        predicted.append([step * scale / math.log(2) / len(query) * product for product in products])
    return np.array(predicted)


def norms(keys: Vector, bits: int) -> Vector:
    """How long the keys of a block, [16, head dim], are told to be: mean and residual as if at right angles."""
    _, mean_factor, _, factors = block_of(keys, bits)
    return np.hypot(mean_factor * length_of_factor(4), np.array(factors) * length_of_factor(bits))


@cache
def length_of_factor(bits: int) -> float:
    """E[x · code of x], x normally distributed: a sum over fine steps."""
    x = (np.arange(400_000) + 0.5) / 400_000 * 10
    values = 2 * np.minimum(np.floor(x / STEPS[bits]), 2 ** (bits - 1) - 1) + 1
    return float((2 * x * values * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)).sum() * 10 / 400_000)


def levels_of(query: Vector) -> tuple[Vector, float]:
    """A query's levels, [head dim], and what one is worth."""
    rotated = rotation(len(query)).double().numpy() @ query
    step = max(abs(rotated)) / 127
    return np.floor(rotated / step + 0.5), step


def bytes_of(values: Sequence[int], bits: int) -> list[int]:
    """Odd numbers as bytes, bit by bit: the first number lies lowest. Of three bits, the lowest ones come last."""
    codes = [(value + 2**bits - 1) // 2 for value in values]
    parts = [([c >> 1 for c in codes], 2), ([c & 1 for c in codes], 1)] if bits == 3 else [(codes, bits)]
    packed = []
    for part, width in parts:
        lines = [number >> bit & 1 for number, bit in product(part, range(width))]
        packed += [sum(bit << place for place, bit in enumerate(lines[at : at + 8])) for at in range(0, len(lines), 8)]
    return packed
