"""What some models change of attention's softmax (``winnow_kernels.softmax``), in kernels."""

from __future__ import annotations

import triton
import triton.language as tl

_MAX_EXPONENT = tl.constexpr(126.0)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def soft_capped(scores: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """Return scaled scores with a soft cap, which is in their unit: float32, of the shape of ``scores``."""
    # tanh(x) = 1 − 2 ÷ (1 + exp(2x)), which is 1 long before the exponential overflows.
    grown = tl.exp2(tl.minimum(scores * (2 * _LOG2_E / cap), _MAX_EXPONENT))
    return cap * (1.0 - 2.0 / (1.0 + grown))


@triton.jit  # type: ignore[untyped-decorator]
def sinks_log2(sink_logits_ptr: tl.tensor, heads: tl.tensor, is_head: tl.tensor) -> tl.tensor:
    """Return the sink logits of some query heads to base 2: float32, of the shape of ``heads``."""
    return tl.load(sink_logits_ptr + heads, mask=is_head, other=-float("inf")).to(tl.float32) * _LOG2_E


@triton.jit  # type: ignore[untyped-decorator]
def grown_by_sinks(sinks: tl.tensor, masses: tl.tensor) -> tl.tensor:
    """Return what outputs over tokens are divided by for their sinks; float32.

    Args:
        sinks: sink logits to base 2.
        masses: log-sum-exps of the tokens' scores, to base 2.
    """
    # Where there is no mass outputs are 0, whatever they are divided by.
    return 1.0 + tl.exp2(tl.minimum(sinks - masses, _MAX_EXPONENT))
