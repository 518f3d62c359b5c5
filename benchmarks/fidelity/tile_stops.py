"""Where a rule stops the reading of a selection, tile by tile, and what attention comes to with what was read.

Masses are shares of all that a query head has, so that a selection's masses add up to its true share. A KV head that
reads the whole context reads it to the end, whatever the rule: as in ``decode.coded_tokens``, nothing is known of an
order there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.fidelity.code_choice import Step, log_sum
from winnow_kernels.attend.early_termination import TILE, Termination, deal, tiles_read
from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.decode.coded_tokens import WHOLE_SHARE
from winnow_kernels.decode.predicted_attention import LOWEST_KEY, STEPS, PredictedAttention, highest
from winnow_kernels.policies.lowbit_top_k.parameters import LowBitTopK
from winnow_kernels.policies.lowbit_top_p.aim import aimed_share
from winnow_kernels.policies.lowbit_top_p.parameters import LowBitTopP

BITS: Final = 2
AS_READ: Final = "as read"
"""The product's order: the newest tokens, the sinks, then the others by predicted mass."""
NEWEST_FIRST: Final = "newest first"
BY_MASS: Final = "by mass"
"""All tokens by predicted mass, those included whose scores are exact."""
ORDERS: Final = (AS_READ, NEWEST_FIRST, BY_MASS)


@dataclass(frozen=True, eq=False)
class Known:
    """What is true, and what is predicted, of one layer's attention of one token.

    Attributes:
        step: its scores.
        predicted: what codes tell of it.
        masses: float64 [KV heads, group, tokens]; the share of the mass that each token holds.
        predicted_masses: float64, same shape; the same as predicted, exact where the policies score exactly.
        values: float64 [KV heads, tokens, head dim].
    """

    step: Step
    predicted: PredictedAttention
    masses: Tensor
    predicted_masses: Tensor
    values: Tensor

    @classmethod
    def of(cls, step: Step, estimates: Tensor, values: Tensor) -> Known:
        """Return what ``estimates`` of the keys tell, [KV heads, tokens, head dim], beside what is true.

        Args:
            step: of a token.
            estimates: of the keys that codes predict.
            values: [KV heads, tokens, head dim], of all tokens.
        """
        predicted = step.predicted(estimates)
        total = log_sum(step.exact)[..., None]
        masses = (step.exact - total).exp2()
        predicted_masses = masses.clone()
        predicted_masses[..., step.sinks : step.scored] = (predicted.steps / STEPS - total).exp2()
        return cls(step, predicted, masses, predicted_masses, values.double())

    @property
    def length(self) -> int:
        """Tokens of the context."""
        return self.masses.shape[-1]

    def selected(self, decode: LowBitTopP | LowBitTopK) -> Tensor:
        """Return which tokens the KV heads read: bool [KV heads, tokens]."""
        always = self.step.kept.shape[-1]
        others = _chosen(decode, self.predicted, always, self.length)
        selected = others.new_ones(len(others), self.length)
        selected[:, self.step.sinks : self.step.scored] = others
        return selected | (selected.sum(-1, keepdim=True) > WHOLE_SHARE * self.length)

    def ranks(self, order: str) -> Tensor:
        """Return what ranks tokens for an order, the first one highest: float64 [KV heads, tokens]."""
        heads = len(self.masses)
        newest_first = torch.arange(self.length, dtype=torch.float64).expand(heads, -1)
        if order == NEWEST_FIRST:
            return newest_first
        if order == BY_MASS:
            return self.predicted_masses.mean(1)
        ranks = newest_first.clone()
        ranks[:, : self.step.sinks] = 1 - newest_first[:, : self.step.sinks] / self.length
        ranks[:, self.step.sinks : self.step.scored] = self.predicted.order().double()
        return ranks

    def attended(self, is_read: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention to ``is_read``, bool [KV heads, tokens], and the share of the mass that this holds.

        Returns:
            float64 [KV heads, group, head dim] and [KV heads, group].
        """
        masses = self.masses * is_read[:, None]
        share = masses.sum(-1)
        return masses @ self.values / share[..., None], share


@dataclass(frozen=True, eq=False)
class Tiles:
    """What the KV heads read, in tiles, in their order.

    Attributes:
        positions: int64 [KV heads, tiles × 64]; in order, beyond the counts they mean nothing.
        counts: int64 [KV heads]; tokens selected.
        is_whole: bool [KV heads]; whether that is the context.
        masses: float64 [KV heads, tiles, group]; share of the mass of each tile.
        predicted: float64, same shape; as predicted.
        rest: float64 [KV heads, group]; predicted share of what is not selected.
        weighted: float64 [KV heads, tiles, group, head dim]; sums of values by mass.
    """

    positions: Tensor
    counts: Tensor
    is_whole: Tensor
    masses: Tensor
    predicted: Tensor
    rest: Tensor
    weighted: Tensor

    @classmethod
    def of(cls, known: Known, selected: Tensor, order: str) -> Tiles:
        """Return what is ``selected``, bool [KV heads, tokens], in an order; what is whole is read newest first."""
        counts = selected.sum(-1)
        is_whole = counts == known.length
        ranks = known.ranks(order).where(~is_whole[:, None], known.ranks(NEWEST_FIRST))
        by_rank = ranks.masked_fill(~selected, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        positions = by_rank[:, : int(counts.max())]
        positions = F.pad(positions, (0, -positions.shape[1] % TILE))
        is_filled = torch.arange(positions.shape[1]) < counts[:, None]

        def in_tiles(masses: Tensor) -> Tensor:
            own = masses.gather(-1, positions[:, None].expand(-1, masses.shape[1], -1)) * is_filled[:, None]
            tiles: Tensor = own.unflatten(-1, (-1, TILE))
            return tiles.transpose(1, 2)

        masses, predicted = in_tiles(known.masses), in_tiles(known.predicted_masses)
        values = known.values.gather(1, positions[..., None].expand(-1, -1, known.values.shape[-1]))
        rest = (known.predicted_masses * ~selected[:, None]).sum(-1)
        weighted = masses @ values.unflatten(1, (-1, TILE))
        return cls(positions, counts, is_whole, masses.sum(-1), predicted.sum(-1), rest, weighted)

    def until_settled(self, thresholds: EarlyTermination) -> Tensor:
        """Return which tiles ART's rule reads, each split by itself: bool [KV heads, tiles]."""
        dealt = deal(self.counts[None], self.masses.shape[1])
        mass = dealt.take(self.masses[None]).cumsum(-2)
        weighted = dealt.take(self.weighted.flatten(-2)[None]).cumsum(-2).unflatten(-1, self.weighted.shape[-2:])
        running = weighted / mass[..., None].clamp_min(torch.finfo(mass.dtype).tiny)
        termination = Termination.of([thresholds], running.device)
        assert termination is not None
        read = tiles_read(running.float(), dealt.counts, termination)[0]
        read = read.where(~self.is_whole[:, None], dealt.counts[0])
        of_split = torch.arange(dealt.tiles.shape[3]) < read[..., None]
        is_read = torch.zeros(self.masses.shape[:2], dtype=torch.bool)
        is_read[of_split.nonzero()[:, 0], dealt.tiles[0][of_split]] = True
        return is_read

    def until_held(self, share: float) -> Tensor:
        """Return which tiles are read until every query head of a group is believed to hold ``share``.

        What was read counts with its exact mass, all else with its predicted one. That is asked after each tile, as if
        one split read them all: of several, none knows what the others have read.

        Returns:
            bool [KV heads, tiles].
        """
        read = self.masses.cumsum(1)
        unread = self.predicted.flip(1).cumsum(1).flip(1) - self.predicted + self.rest[:, None]
        may_stop = (read >= share * (read + unread)).all(-1) & ~self.is_whole[:, None]
        is_stopped = may_stop.cumsum(1) - may_stop.long() > 0
        return ~is_stopped & (torch.arange(may_stop.shape[1]) * TILE < self.counts[:, None])

    def tokens(self, is_read: Tensor) -> Tensor:
        """Return how many tokens lie in the tiles ``is_read``, bool [KV heads, tiles]: int64 [KV heads]."""
        sizes = (self.counts[:, None] - torch.arange(is_read.shape[1]) * TILE).clamp(0, TILE)
        return (sizes * is_read).sum(-1)

    def attended(self, is_read: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention to the tiles ``is_read`` and the share of the mass that they hold, as of ``Known``."""
        share: Tensor = (self.masses * is_read[..., None]).sum(1)
        weighted = (self.weighted * is_read[..., None, None]).sum(1)
        return weighted / share[..., None], share


def _chosen(decode: LowBitTopP | LowBitTopK, predicted: PredictedAttention, always: int, length: int) -> Tensor:
    """Return which of the others a policy takes beside the ``always`` kept: bool [KV heads, others]."""
    if isinstance(decode, LowBitTopK):
        return highest(predicted.keys(), max(0, decode.tokens(length - 1) - always))
    chosen = predicted.reaching(aimed_share(decode.p, BITS), decode.min_tokens - always).any(-2)
    if decode.max_tokens is None:
        return chosen
    room = max(0, decode.max_tokens - always)
    best = highest(predicted.order().where(chosen, LOWEST_KEY), room)
    return best.where(chosen.sum(-1, keepdim=True) > room, chosen)
