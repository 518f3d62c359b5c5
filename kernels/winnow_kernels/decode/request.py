"""What a policy knows of a request that it serves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from winnow_kernels.attend.gather import Meter
from winnow_kernels.cache import LayerCache
from winnow_kernels.contract.fields import Parameters


class PromptSelection(ABC):
    """What a request keeps of its prompt, chosen once by the prompt's own queries.

    Attributes:
        kept: for each layer that has chosen, int64 [KV heads, most]; positions in the order in which they are read.
            From ``counts`` on they mean nothing.
        moved: like ``kept``, the positions at which what is kept lies since it was moved (``compaction``); None while
            it lies at its own. On a GPU the selector has them, and it is empty.
    """

    kept: dict[int, Tensor]
    moved: Mapping[int, Tensor] | None = None

    def counts(self, layer: int) -> Tensor:
        """Return how many positions each KV head keeps in a layer that has chosen: int64 [KV heads], at least 1."""
        heads, most = self.kept[layer].shape
        return torch.full((heads,), most, device=self.kept[layer].device)

    def places(self, layer: int) -> Tensor:
        """Return the positions at which what is kept lies: as ``kept``."""
        return (self.kept if self.moved is None else self.moved)[layer]

    @abstractmethod
    def record(self, layer: int, queries: Tensor, first_position: int) -> None:
        """Keep those of a prefill chunk's queries that choose.

        Args:
            layer: the layer's number.
            queries: [new tokens, query heads, head dim], rotated.
            first_position: position of the first of them.
        """

    @abstractmethod
    def vote(self, layer: int, cache: LayerCache, slots: Tensor, scale: float, meter: Meter) -> None:
        """Decide once and for all what the request keeps in ``layer``.

        Args:
            layer: the layer's number.
            cache: the layer's KV cache.
            slots: int64 [prompt length]; where the prompt's tokens lie.
            scale: what scores are multiplied by before the softmax.
            meter: counts the keys that are read; of one row.
        """


class CheckObserver(ABC):
    """What a verified request keeps of the dense passes that check its drafts."""

    @abstractmethod
    def observe(self, layer: int, queries: Tensor, slots: Tensor, cache: LayerCache, scale: float) -> None:
        """See a layer of a check, whose keys and values are in the cache.

        Args:
            layer: its number.
            queries: [new tokens, query heads, head dim], rotated: those of the tokens that are checked.
            slots: int64 [tokens]; the KV slot of each token of the context, the new ones last.
            cache: the layer's KV cache.
            scale: what scores are multiplied by before the softmax.
        """


class Request(Protocol):
    """A request, as long as it lives.

    Attributes:
        prompt_length: tokens.
        last_prefill: where the last prefill ended; after a retraction, behind the prompt.
        kept: what the request keeps of its prompt, if its policy keeps a part.
        checked: what it keeps of the checks of its drafts, if its policy drafts from that.
    """

    prompt_length: int
    last_prefill: int
    kept: PromptSelection | None
    checked: CheckObserver | None

    @property
    def decode(self) -> Parameters:
        """The parameters of its decode policy."""
