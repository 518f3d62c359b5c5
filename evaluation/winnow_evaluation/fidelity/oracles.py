"""Oracles: what a policy would read that knew the exact attention beforehand. None can be had at their price.

Each reads for a KV head what its group needs, and the first ``sinks`` tokens always, as the policies do. Some policies
always read the newest tokens, too: beside these stand oracles that do the same (``newest``). Oracles bound what
policies reach with as many tokens; their cost is what they attend to, without any index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from winnow_evaluation.fidelity.exact import Scores

SINKS: Final = 16
PAGE: Final = 16
_BITS_OF_ONE: Final = 0x3F800000


@dataclass(frozen=True)
class Oracle(ABC):
    """What is read, by the exact attention weights.

    Attributes:
        sinks: leading tokens that are always read.
        newest: least newest tokens that are always read, back to the beginning of a page.
    """

    name: ClassVar[str]
    sinks: int = SINKS
    newest: int = 0

    @property
    def p(self) -> float | None:
        """The share that each query head is to hold; None where there is no such."""
        return None

    def parameters(self) -> dict[str, Any]:
        """Return what tells it from others of its name."""
        return {name: value for name, value in asdict(self).items() if name != "newest" or value}

    @property
    def label(self) -> str:
        """What it is called while it is being measured."""
        parameters = self.parameters()
        return " ".join(
            [self.name, *(f"{name} {parameters[name]:g}" for name in ("p", "budget", "newest") if name in parameters)]
        )

    def read(self, scores: Scores) -> Tensor:
        """Return what is read: bool [prompts, KV heads, tokens, context]."""
        weights = scores.weights()
        places = torch.arange(weights.shape[-1], device=weights.device)
        always = places < self.sinks
        if self.newest:
            lengths = scores.visible.sum(-1, keepdim=True)
            always = always | (places >= (lengths - self.newest) // PAGE * PAGE)
        return self.choose(weights, always & scores.visible) & scores.visible

    @abstractmethod
    def choose(self, weights: Tensor, always: Tensor) -> Tensor:
        """Return what is read by the attention weights.

        Args:
            weights: [..., tokens, group, context].
            always: bool [..., tokens, context], or what can be broadcast to it; what is read in any case.

        Returns:
            bool [..., tokens, context]; of what is not visible, anything.
        """


@dataclass(frozen=True)
class TopP(Oracle):
    """The fewest tokens that hold ``share`` of each query head's attention; a KV head reads the union of its group's.

    Tokens of equal weight are taken all, or none.
    """

    name: ClassVar[str] = "oracle_top_p"
    share: float = 0.9

    @property
    def p(self) -> float:
        return self.share

    def parameters(self) -> dict[str, Any]:
        parameters = super().parameters()
        return {"p": parameters.pop("share"), **parameters}

    def choose(self, weights: Tensor, always: Tensor) -> Tensor:
        always = always[..., None, :]
        others = weights.masked_fill(always, 0)
        needed = self.share - (weights.sum(-1) - others.sum(-1))
        return (always | (others.view(torch.int32) >= _least_kept(others, needed)[..., None])).any(-2)


@dataclass(frozen=True)
class TopTokens(Oracle):
    """The ``budget`` tokens that weigh most, summed over the group."""

    name: ClassVar[str] = "oracle_top_k"
    budget: int = 1024

    def choose(self, weights: Tensor, always: Tensor) -> Tensor:
        return _largest(weights.sum(-2).masked_fill(always, torch.inf), self.budget)


@dataclass(frozen=True)
class TopPages(Oracle):
    """The pages of 16 tokens that weigh most, summed over the group: as many as hold ``budget`` tokens."""

    name: ClassVar[str] = "oracle_pages"
    budget: int = 1024

    def choose(self, weights: Tensor, always: Tensor) -> Tensor:
        of_tokens = weights.sum(-2).masked_fill(always, torch.inf)
        context = of_tokens.shape[-1]
        of_pages = F.pad(of_tokens, (0, -context % PAGE)).unflatten(-1, (-1, PAGE)).sum(-1)
        return _largest(of_pages, -(-self.budget // PAGE)).repeat_interleave(PAGE, dim=-1)[..., :context]


def _largest(masses: Tensor, count: int) -> Tensor:
    """Return which are the ``count`` largest of the last dimension."""
    largest = masses.topk(min(count, masses.shape[-1]), dim=-1, sorted=False).indices
    return torch.zeros_like(masses, dtype=torch.bool).scatter_(-1, largest, value=True)


def _least_kept(weights: Tensor, needed: Tensor) -> Tensor:
    """Return the bits of the greatest weight w such that all weights from w on sum up to ``needed``: int32 [...].

    Weights are float32 from 0 to 1, [..., n]: their bits have their order, and halving the range of bits finds one of
    them in 30 rounds, without a sort. Above all weights where nothing is needed.
    """
    bits = weights.view(torch.int32)
    reaching = torch.zeros_like(needed, dtype=torch.int32)
    beyond = torch.full_like(reaching, _BITS_OF_ONE + 1)
    # At ``beyond`` nothing is kept.
    reaching = torch.where(needed <= 0, beyond, reaching)
    for _ in range(_BITS_OF_ONE.bit_length()):
        middle = (reaching + beyond) // 2
        reaches = torch.where(bits >= middle[..., None], weights, 0).sum(-1) >= needed
        reaching, beyond = torch.where(reaches, middle, reaching), torch.where(reaches, beyond, middle)
    return reaching
