"""One more tile of keys and values in a running softmax: what all programs of ``attend.gpu`` do.

Rows get the same bits with and without early termination in their batch because both kernels call this.
"""

from __future__ import annotations

import triton
import triton.language as tl

from winnow_kernels.attend.gpu_merge import INFINITY
from winnow_kernels.attend.gpu_softmax import soft_capped
from winnow_kernels.attend.gpu_widening import computable, reference_of


@triton.jit  # type: ignore[untyped-decorator]
def attend_tile(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    is_token: tl.tensor,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor | None,
    highest: tl.tensor,
    masses: tl.tensor,
    weighted: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return what weights are relative to, masses and weighted values with one more tile in them.

    Args:
        query: [heads, head dim]; the query heads of a KV head, padded.
        key: [``TILE``, head dim], in the query's dtype or a narrow one.
        value: [``TILE``, head dim]; likewise.
        is_token: bool [``TILE``]; false beyond the end of a selection.
        scale_log2: what scores are multiplied by, to base 2.
        cap_log2: what then bounds them, to base 2; None for no cap.
        highest: float32 [heads]; what weights are relative to, to base 2: the highest score so far, or some below it.
        masses: float32 [heads, ``TILE``]; sums of weights relative to it, of the tokens at each place of all tiles. The
            mass is their sum, for which warps must wait for each other: once at the end, not in every tile.
        weighted: float32 [heads, head dim]; sum of values by these weights.
    """
    query = computable(query, key.dtype)
    key, value = key.to(query.dtype), value.to(query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
    if cap_log2 is not None:
        scores = soft_capped(scores, cap_log2)
    scores = tl.where(is_token[None, :], scores, -INFINITY)
    new_highest = tl.maximum(highest, reference_of(tl.max(scores, axis=1), value.dtype))
    fade = tl.exp2(highest - new_highest)
    weights = tl.exp2(scores - new_highest[:, None])
    masses = masses * fade[:, None] + weights
    weighted = tl.dot(weights.to(value.dtype), value, weighted * fade[:, None], input_precision="ieee")
    return new_highest, masses, weighted
