"""In which numbers of 16 bits kernels attend to a cache of 8 bits.

Two numbers of 8 bits become float16 in one instruction. Each takes one more to become bfloat16, and of those a Hopper
multiprocessor begins 16 a cycle: they take longer than loading the numbers. Both hold all numbers of 8 bits, and a
float16 three more digits of a weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LARGEST_HALF = tl.constexpr(65504.0)
# A float16 has all its digits from 2^-14 to 2^16: weights up to 2^15 keep more of their tail than weights up to 1.
_LIFT = tl.constexpr(15.0)


@triton.jit  # type: ignore[untyped-decorator]
def computable(query: tl.tensor, stored: tl.constexpr) -> tl.tensor:
    """Return queries in the dtype in which they are multiplied with keys, and weights with values.

    Args:
        query: of any shape.
        stored: the cache's dtype.
    """
    result = query
    if query.dtype == tl.bfloat16 and stored.primitive_bitwidth < query.dtype.primitive_bitwidth:
        # No score of use has a larger number in it, and infinity would make NaN of scores.
        result = tl.clamp(query.to(tl.float32), -_LARGEST_HALF, _LARGEST_HALF).to(tl.float16)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def reference_of(highest: tl.tensor, computed: tl.constexpr) -> tl.tensor:
    """Return what weights are relative to, where ``highest`` scores, to base 2, are known.

    Args:
        highest: float32 of any shape.
        computed: dtype of the weights in products with values.
    """
    result = highest
    if computed == tl.float16:
        result = highest - _LIFT
    return result
