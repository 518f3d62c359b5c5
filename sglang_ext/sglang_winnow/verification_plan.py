"""One pass that checks drafts: the newest accepted token of each request and its drafts, densely."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from winnow_kernels.attend.dense import prefill
from winnow_kernels.cache import Context, LayerCache


class VerificationPlan:
    """Where each request's unchecked tokens lie in the batch. They attend causally to everything."""

    def __init__(self, context: Context, new_lengths: Sequence[int]) -> None:
        """
        Args:
            context: of the requests, with the unchecked tokens.
            new_lengths: unchecked tokens of each, the last ones of its context.
        """
        self._slots = [slots[:length] for slots, length in zip(context.slots, context.lengths.tolist(), strict=True)]
        self._new_lengths = list(new_lengths)

    def attend(self, layer: int, queries: Tensor, cache: LayerCache, scale: float, window: int | None) -> Tensor:
        """Return the attention output of a layer: [tokens, query heads, head dim], as ``queries``."""
        del layer
        parts = zip(queries.split(self._new_lengths), self._slots, strict=True)
        return torch.cat([prefill(own, slots, cache, scale, window) for own, slots in parts])

    def finish(self) -> None:
        """Take no note: requests count what they read where drafts are accepted."""
