"""A decode pass beside those of requests: dense in every layer for every row, and counted nowhere."""

from __future__ import annotations

from torch import Tensor

from winnow_kernels.attend.dense import attend_all
from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import Context, LayerCache


class DensePassPlan:
    """Call ``attend`` for each layer, then ``finish``.

    Args:
        context: of the rows.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def attend(self, _layer: int, queries: Tensor, cache: LayerCache, scale: float, window: int | None) -> Tensor:
        """Return the attention output of a layer: [requests, query heads, head dim], as ``queries``.

        Args:
            queries: one row for each request.
            cache: the layer's KV cache, with the new tokens in it.
            scale: what scores are multiplied by before the softmax.
            window: the layer's sliding window in tokens; None for the whole context.
        """
        uncounted = Meter(self._context.requests, queries.device)
        return attend_all(queries, self._context, cache, scale, uncounted, window)

    def finish(self) -> None:
        """Count nothing; call after the last layer."""
