"""Which of a model's layers policies act on: the device has caches, indexes and selections of these alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

from sglang_winnow.forward_pass import window_of

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention


@dataclass(frozen=True)
class ModelLayers:
    """A model's attention layers. Those with full attention are known by their places among them, from 0 on.

    Layers with linear attention are not among them: SGLang runs these beside the backend.

    Attributes:
        full: SGLang's numbers of the layers with full attention, ascending.
        windows: of the other layers, by SGLang's number: how many tokens before its own a query sees.
    """

    full: tuple[int, ...]
    windows: Mapping[int, int]

    @classmethod
    def of(cls, layers: Sequence[RadixAttention]) -> Self:
        """Return what ``layers`` are, which are in the model's order."""
        windows = {layer.layer_id: window_of(layer) for layer in layers}
        return cls(
            tuple(number for number, window in windows.items() if window is None),
            {number: window for number, window in windows.items() if window is not None},
        )

    def place(self, layer: int) -> int | None:
        """Return the place of SGLang's layer ``layer``; None for one with a window."""
        return self._places.get(layer)

    @property
    def placed(self) -> tuple[int, ...] | None:
        """The numbers of the layers with full attention, if these are not their places."""
        return None if self.full == tuple(range(len(self.full))) else self.full

    @cached_property
    def last(self) -> int:
        """SGLang's number of the last attention layer."""
        return max(*self.full, *self.windows, -1)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {layer: place for place, layer in enumerate(self.full)}
