"""One pass in which some requests are prefilled and others decode, as with ``--enable-mixed-chunk``."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_winnow.decode_plan import DecodePlan
from sglang_winnow.prefill_plan import PrefillPlan
from winnow_kernels.cache import LayerCache


class MixedPlan:
    """A plan for the requests that are prefilled, whose tokens come first, and one for those that decode.

    Attributes:
        compared: the rows whose next token is to be compared with dense attention's after the pass.
    """

    def __init__(self, prefill: PrefillPlan, decode: DecodePlan) -> None:
        self._prefill = prefill
        self._decode = decode
        self._new_tokens = prefill.chunks[-1].rows.stop
        self.compared = [len(prefill.chunks) + row for row in decode.compared]

    def attend(self, layer: int, queries: Tensor, cache: LayerCache, scale: float, window: int | None) -> Tensor:
        """Return the attention output of a layer: [tokens, query heads, head dim], as ``queries``.

        Args:
            layer: its number.
            queries: the new tokens of all requests that are prefilled, then one of each that decodes.
            cache: the layer's KV cache, with the new tokens in it.
            scale: what scores are multiplied by before the softmax.
            window: the layer's sliding window in tokens; such a layer is dense for every request and not counted.
        """
        prefilled, decoded = queries[: self._new_tokens], queries[self._new_tokens :]
        parts = [
            self._prefill.attend(layer, prefilled, cache, scale, window),
            self._decode.attend(layer, decoded, cache, scale, window),
        ]
        return torch.cat(parts)

    def finish(self) -> None:
        """Add what was read to the statistics; call after the last layer."""
        self._prefill.finish()
        self._decode.finish()
