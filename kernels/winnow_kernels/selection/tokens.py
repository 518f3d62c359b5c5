"""What a selector picked."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from winnow_kernels.cache import Context


@dataclass(frozen=True, eq=False)
class Selection:
    """The tokens that each request and KV head attends to, in the order in which they are read.

    That order is of descending priority wherever early termination may stop reading.

    Attributes:
        slots: int64 [requests, KV heads, width]; from ``counts`` on their content means nothing.
        counts: int64 [requests, KV heads], at least 1 each.
        to_the_end: bool [requests, KV heads]; what is read to its end whatever early termination says, because nothing
            is known of an order. None for nothing.
    """

    slots: Tensor
    counts: Tensor
    to_the_end: Tensor | None = None

    @property
    def width(self) -> int:
        return self.slots.shape[2]

    @property
    def filled(self) -> Tensor:
        """Bool [requests, KV heads, width]: which entries count."""
        return torch.arange(self.width, device=self.slots.device) < self.counts[..., None]

    def padded_to(self, multiple: int) -> Selection:
        """Return the same selection with a width that is a multiple of ``multiple``."""
        return replace(self, slots=torch.nn.functional.pad(self.slots, (0, -self.width % multiple)))


def select_positions(context: Context, positions: Tensor, counts: Tensor) -> Selection:
    """Return the selection of the first ``counts``, int64 [requests, KV heads], of ``positions``.

    These are int64 [requests, KV heads, width], and beyond the counts any number.
    """
    filled = torch.arange(positions.shape[2], device=positions.device) < counts[..., None]
    return Selection(context.slots_at(positions.where(filled, 0)), counts)
