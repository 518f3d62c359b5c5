"""How attention is spread over tokens, as exact scores of a few and predicted scores of all others say.

Shapes may begin with a batch's requests. Scores are logarithms to base 2. Predicted ones are rounded to steps of an
eighth: tokens of one step are alike. A token that is predicted to hold less than 2^-24 of a query head's mass weighs
nothing, and all such tokens are one step, the lowest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS: Final = 8
"""Steps from one mass to its double."""
FLOOR: Final = -24
"""Logarithm of the share of the mass below which a token weighs nothing."""
KEY_STEPS: Final = 64
"""Keys from one share to its double."""
LOWEST_KEY: Final = FLOOR * KEY_STEPS
ORDER_KEYS: Final = 16
"""Neighbouring keys that make no difference to the order in which tokens are read."""
# Beside the highest predicted score, what is 48 octaves below it is lost even to float64 sums of a million tokens.
_COUNTED: Final = 48 * STEPS


@dataclass(frozen=True)
class PredictedAttention:
    """What is known of requests' attention in a layer.

    Attributes:
        kept: float64 [..., KV heads, group, 1]; logarithm of the mass of the tokens whose scores are exact.
        steps: float32 [..., KV heads, group, others]; the predicted scores of all others, whole numbers of steps.
        tokens: int64 [..., KV heads, 1, others]; how many tokens have each of these scores: one, or a cluster's.
    """

    kept: Tensor
    steps: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, kept: Tensor, predicted: Tensor, tokens: Tensor | None = None) -> PredictedAttention:
        """Return what is known of requests' attention in a layer.

        Args:
            kept: float [..., KV heads, group, n]; exact scores, -inf for no token.
            predicted: float [..., KV heads, group, others]; predicted scores of at least one token.
            tokens: int64 [..., KV heads, others]; how many tokens have each of these; one by default.
        """
        highest = kept.amax(-1, keepdim=True).double().clamp_min_(torch.finfo(torch.float32).min)
        mass = (kept - highest).exp2().sum(-1, keepdim=True)
        steps = (predicted * STEPS).round_()
        if tokens is None:
            return cls(highest + mass.log2(), steps, torch.ones_like(steps[..., :1, :], dtype=torch.int64))
        tokens = tokens[..., None, :]
        return cls(highest + mass.log2(), steps.masked_fill_(tokens == 0, -torch.inf), tokens)

    @cached_property
    def total(self) -> Tensor:
        """Logarithm of the mass of all tokens: float64 [..., KV heads, group, 1]."""
        highest = torch.maximum(self.kept, self._scores[..., :1])
        others = (self._counts * (self._scores - highest).exp2()).sum(-1, keepdim=True)
        return highest + ((self.kept - highest).exp2() + others).log2()

    @property
    def kept_share(self) -> Tensor:
        """Share of the mass that the tokens with exact scores hold: float64 [..., KV heads, group, 1]."""
        return (self.kept - self.total).exp2()

    @property
    def shares(self) -> Tensor:
        """What share of the mass a token of each other is predicted to hold: float64 [..., KV heads, group, others]."""
        return self._shares.gather(-1, self._places)

    def reaching(self, share: float, least: int) -> Tensor:
        """Return which of the others each query head takes: all from the step on with which it has enough.

        Args:
            share: of the mass, that the tokens taken and those with exact scores must hold.
            least: how many of the others to take, if there are as many.

        Returns:
            bool [..., KV heads, group, others].
        """
        # Above a step that weighs nothing there are all that weigh something.
        counts = self._counts.masked_fill(self._shares == 0, 0)
        masses = counts * self._shares
        is_needed = masses.cumsum(-1) - masses < share - self.kept_share
        is_needed |= counts.cumsum(-1) - counts < least
        return self._places < is_needed.sum(-1, keepdim=True)

    def keys(self) -> Tensor:
        """Return what ranks the others, the highest first: int64 [..., KV heads, others].

        It is the logarithm, in steps of 1/64, of the share that a token holds on average over the group, at least that
        of the floor.
        """
        return self.shares.mean(-2).log2_().mul_(KEY_STEPS).floor_().clamp_min_(LOWEST_KEY).long()

    def order(self) -> Tensor:
        """Return what says in which order the others are read, the highest first: int64 [..., KV heads, others]."""
        return self.keys() // ORDER_KEYS

    def held(self, others: Tensor, is_other: Tensor) -> Tensor:
        """Return what share of the mass is held together by the tokens with exact scores and by some of the others.

        Args:
            others: int64 [..., KV heads, n]; which of the others, by number.
            is_other: bool, same shape; false where there is none.

        Returns:
            float64 [..., KV heads, group].
        """
        places = self._places.gather(-1, others[..., None, :].expand(*self._places.shape[:-1], -1))
        shares = self._shares.gather(-1, places).where(is_other[..., None, :], 0.0)
        return (self.kept_share[..., 0] + shares.sum(-1)).clamp_max_(1.0)

    @cached_property
    def _places(self) -> Tensor:
        """How many steps each of the others is below the highest, at most ``_COUNTED``: int64, as ``steps``."""
        return (self.steps.amax(-1, keepdim=True) - self.steps).clamp_max_(_COUNTED).long()

    @cached_property
    def _counts(self) -> Tensor:
        """How many tokens each place has: int64 [..., KV heads, group, places]."""
        counts = torch.zeros(*self.steps.shape[:-1], _COUNTED + 1, dtype=torch.int64, device=self.steps.device)
        return counts.scatter_add_(-1, self._places, self.tokens.expand_as(self._places))

    @cached_property
    def _scores(self) -> Tensor:
        """The predicted scores of the places: float64 [..., KV heads, group, places]."""
        places = torch.arange(_COUNTED + 1, dtype=torch.float64, device=self.steps.device)
        return (self.steps.amax(-1, keepdim=True) - places) / STEPS

    @cached_property
    def _shares(self) -> Tensor:
        """The shares of the places: float64 [..., KV heads, group, places]."""
        logarithms = self._scores - self.total
        return logarithms.exp2().masked_fill_(logarithms < FLOOR, 0.0)


def highest(keys: Tensor, count: int) -> Tensor:
    """Return which of ``keys``, int64 [..., n], are the ``count`` highest, of equal ones the first: bool [..., n].

    Keys lie between ``LOWEST_KEY`` and 0.
    """
    counts = keys.new_zeros(*keys.shape[:-1], 1 - LOWEST_KEY).scatter_add_(-1, -keys, torch.ones_like(keys))
    # How many are above each key, and the one of which only some are taken.
    above = F.pad(counts.cumsum(-1), (1, 0))
    last = (above[..., 1:] <= count).sum(-1, keepdim=True)
    is_last = -keys == last
    return (-keys < last) | is_last & (is_last.cumsum(-1) <= count - above.gather(-1, last))
