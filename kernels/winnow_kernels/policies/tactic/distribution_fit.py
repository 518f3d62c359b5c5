"""How many tokens of a ranked list hold a share of the attention mass (Tactic, section 3.4 and Algorithm 1).

The weights of the list's first N tokens are known; those of the others are taken from the curve y = a/x + b, where x is
a token's place in the list, from 1. Weights are exp(score - reference) with one reference for each query head: nothing
here depends on the scale of the scores. [...] below is the same shape everywhere: [requests, KV heads, group].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Curve:
    """y = a/x + b, and zero from where that is negative. All float64.

    Attributes:
        a: at least 0.
        b: negative only where ``a`` is positive.
    """

    a: Tensor
    b: Tensor

    @classmethod
    def through(cls, place1: Tensor, weight1: Tensor, place2: Tensor, weight2: Tensor) -> Curve:
        """Return the curve through two points, ``place1`` < ``place2``; where it would not fall, their flat mean."""
        place1, weight1, place2, weight2 = (t.double() for t in (place1, weight1, place2, weight2))
        falls = (weight1 > weight2) & (place1 < place2)
        width = (place2 - place1).where(falls, 1.0)
        a = ((weight1 - weight2) * place1 * place2 / width).where(falls, 0.0)
        b = ((weight2 * place2 - weight1 * place1) / width).where(falls, (weight1 + weight2) / 2)
        return cls(a, b)

    def last_positive(self, first: Tensor, last: Tensor) -> Tensor:
        """Return the last place in ``first`` … ``last`` at which the curve is positive, at least ``first``; float64."""
        crossing = torch.where(self.b < 0, (self.a / -self.b.clamp_max(-torch.finfo(torch.float64).tiny)).floor(), last)
        return torch.minimum(crossing, last).maximum(first)

    def mass(self, first: Tensor, last: Tensor) -> Tensor:
        """Return the sum of the weights at places ``first`` + 1 … ``last``, all of them positive: [..., any]."""
        harmonic = torch.digamma(last + 1) - torch.digamma(first + 1)[..., None]
        return self.a[..., None] * harmonic + self.b[..., None] * (last - first[..., None])


@dataclass(frozen=True)
class RankedMass:
    """What is known of the attention mass of a ranked list and of the tokens outside it, which are always attended.

    Attributes:
        outside: float64 [...]; exact mass of the tokens outside the list.
        first: float64 [..., widest]; the exact weights of the list's first ``known`` tokens, summed up to each; beyond
            ``known`` the last sum.
        known: float64 [...]; how many weights are exact.
        tokens: float64 [...]; tokens in the list, at least ``known``.
        curve: the weights of the others.
    """

    outside: Tensor
    first: Tensor
    known: Tensor
    tokens: Tensor
    curve: Curve

    def tokens_for(self, share: Tensor) -> Tensor:
        """Return the smallest number of the list's first tokens that holds ``share`` of all mass, with those outside.

        All tokens have some mass, whatever the curve says: a share of 1 takes the whole list.

        Args:
            share: float64, broadcasting to [...].

        Returns:
            float64 [...], whole numbers.
        """
        end = self.curve.last_positive(self.known, self.tokens)
        target = share * self.total - self.outside
        held = self.first[..., -1] if self.first.shape[-1] else torch.zeros_like(target)
        places = torch.arange(1, self.first.shape[-1] + 1, device=target.device)
        below = (self.first < target[..., None]) & (places <= self.known[..., None])
        among_known = below.sum(-1) + 1.0

        # Two rounds narrow the place down to one of √n, then to one.
        stride = self.tokens.sqrt().ceil().clamp_min(1.0)
        steps = torch.arange(1, int(stride.max()) + 1, dtype=torch.float64, device=target.device)
        wanted = (target - held)[..., None]
        coarse = torch.minimum(self.known[..., None] + steps * stride[..., None], end[..., None])
        base = self.known + (self.curve.mass(self.known, coarse) < wanted).sum(-1) * stride
        fine = torch.minimum(base[..., None] + steps, end[..., None])
        within = (self.curve.mass(self.known, fine) < wanted) & (steps <= stride[..., None])
        beyond_known = torch.minimum(base + within.sum(-1) + 1, end)

        needed = torch.where(target <= held, torch.minimum(among_known, self.known), beyond_known)
        needed = needed.masked_fill(target <= 0, 0.0)
        return torch.where(share >= 1, self.tokens, needed)

    @cached_property
    def total(self) -> Tensor:
        """float64 [...]: the mass of all tokens."""
        return self.outside + self.held_by(self.tokens)

    def held_by(self, tokens: Tensor) -> Tensor:
        """Return the mass of the list's first ``tokens``, float64 [...]."""
        padded = torch.nn.functional.pad(self.first, (1, 0))
        exact = padded.gather(-1, torch.minimum(tokens, self.known).long()[..., None])[..., 0]
        end = torch.minimum(tokens, self.curve.last_positive(self.known, self.tokens)).maximum(self.known)
        return exact + self.curve.mass(self.known, end[..., None])[..., 0]
