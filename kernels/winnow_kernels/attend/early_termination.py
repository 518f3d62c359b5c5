"""Early termination (ART, arXiv text in the project's papers, section 3.2): stop reading once the output has settled.

The paper's formulas and thresholds are lost from our copy; these are ours. A tile is 64 tokens of a selection, in its
order. After each tile the probe p_t of a query head is 32 elements, spread evenly over the head dimension, of its
normalised running output. The tile is calm if

    | ‖p_t‖ − ‖p_t−1‖ | ≤ scale · ‖p_t−1‖   and   1 − cos(p_t, p_t−1) ≤ direction

for every query head of a KV head's group; the KV head stops after ``patience`` calm tiles in a row.

With a sink logit (``winnow_kernels.softmax``) the output is the one with the sink, which grows with the mass that was
read. A split judges by the whole sink beside its own part of the tokens, where it weighs more than in the end.

Long selections are dealt out to splits tile by tile, in turn, so that each split sees the order; each stops by itself,
and their outputs are merged by log-sum-exp. How many splits there are depends on the selection's own length alone: what
a request reads does not depend on its neighbours in the batch, nor on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from winnow_kernels.contract.early_termination import EarlyTermination

TILE = 64
PROBE = 32
TILES_PER_SPLIT = 16
MAX_SPLITS = 16


@dataclass(frozen=True)
class Termination:
    """The thresholds of a batch's requests; a request without early termination has infinite patience.

    Attributes:
        scale: float32 [requests].
        direction: float32 [requests].
        patience: float32 [requests].
    """

    scale: Tensor
    direction: Tensor
    patience: Tensor

    @classmethod
    def of(cls, requests: Sequence[EarlyTermination | None], device: torch.device) -> Termination | None:
        """Return the requests' thresholds as tensors; None if no request has any."""
        if not any(requests):
            return None
        rows = [(r.scale, r.direction, r.patience) if r else (0.0, 0.0, torch.inf) for r in requests]
        return cls(*torch.tensor(rows, dtype=torch.float32, device=device).unbind(1))


@dataclass(frozen=True)
class Dealt:
    """Which tiles of a selection each split has. Tile t of a selection with S splits is tile t // S of split t % S.

    Attributes:
        tiles: int64 [requests, KV heads, splits, tiles of a split]; index of the tile, any number where there is none.
        counts: int64 [requests, KV heads, splits]; tiles that the split has.
    """

    tiles: Tensor
    counts: Tensor

    @property
    def present(self) -> Tensor:
        """bool, shape of ``tiles``."""
        return torch.arange(self.tiles.shape[3], device=self.tiles.device) < self.counts[..., None]

    def take(self, values: Tensor) -> Tensor:
        """Return ``values`` of tiles, [requests, KV heads, tiles, n], as the splits have them, [..., splits, tiles, n].

        Where a split has no more tiles, its last one is repeated: whoever takes must not look there.
        """
        last = (self.counts - 1).clamp_min(0)[..., None]
        tiles = self.tiles.where(self.present, self.tiles.take_along_dim(last, 3))
        tiles = tiles.where(self.counts[..., None] > 0, 0)
        return values.take_along_dim(tiles.flatten(2)[..., None], 2).unflatten(2, tiles.shape[2:])

    def tokens(self, read: Tensor, tokens: Tensor) -> Tensor:
        """Return how many of a selection's ``tokens`` lie in the first ``read`` tiles of its splits.

        Args:
            read: int64 [requests, KV heads, splits].
            tokens: int64 [requests, KV heads].

        Returns:
            int64 [requests, KV heads].
        """
        index = torch.arange(self.tiles.shape[3], device=read.device)
        sizes = (tokens[..., None, None] - self.tiles * TILE).clamp(0, TILE)
        return sizes.where(index < read[..., None], 0).sum((2, 3))


def deal(counts: Tensor, tiles: int) -> Dealt:
    """Deal selections of ``counts`` tokens, int64 [requests, KV heads], out to their splits.

    A selection has one split per 16 tiles begun, at most 16; ``tiles`` is how many the longest has.
    """
    of_selection = -(-counts // TILE)
    splits = (-(-of_selection // TILES_PER_SPLIT)).clamp(1, MAX_SPLITS)
    most = min(MAX_SPLITS, max(1, -(-tiles // TILES_PER_SPLIT)))
    longest = max(min(tiles, TILES_PER_SPLIT), -(-tiles // MAX_SPLITS))
    split = torch.arange(most, device=counts.device)
    index = torch.arange(longest, device=counts.device)
    of_split = -(-(of_selection[..., None] - split).clamp_min(0) // splits[..., None])
    of_split = of_split.where(split < splits[..., None], 0)
    return Dealt(index * splits[..., None, None] + split[:, None], of_split)


def probe_of(outputs: Tensor) -> Tensor:
    """Return the probe of ``outputs``, [..., head dim]: 32 elements, spread evenly over all of it; of fewer all."""
    head_dim = outputs.shape[-1]
    if head_dim <= PROBE:
        return outputs
    return outputs[..., torch.arange(PROBE, device=outputs.device) * head_dim // PROBE]


def tiles_read(running: Tensor, tiles: Tensor, termination: Termination) -> Tensor:
    """Return how many tiles each split reads before it stops.

    Args:
        running: float [requests, KV heads, splits, tiles, query heads of the group, head dim]; the normalised output of
            a split, with sinks, after each of its tiles.
        tiles: int64 [requests, KV heads, splits]; tiles that the split has.
        termination: thresholds.

    Returns:
        int64 [requests, KV heads, splits], at most ``tiles``.
    """
    probe = probe_of(running)
    norms = torch.linalg.vector_norm(probe, dim=-1)
    before, after = norms[..., :-1, :], norms[..., 1:, :]
    cosine = (probe[..., :-1, :, :] * probe[..., 1:, :, :]).sum(-1) / (before * after).clamp_min(
        torch.finfo(probe.dtype).tiny
    )
    shape = (-1, 1, 1, 1, 1)
    calm = (after - before).abs() <= termination.scale.view(shape) * before
    calm &= 1 - cosine <= termination.direction.view(shape)
    calm_tiles = calm.all(-1)
    # The first tile has nothing to be compared with.
    index = torch.arange(1, calm_tiles.shape[-1] + 1, device=tiles.device)
    last_restless = torch.where(calm_tiles, 0, index).cummax(-1).values
    settled = index - last_restless >= termination.patience.view(-1, 1, 1, 1)
    never = tiles.new_full((), running.shape[3])
    first = torch.where(settled, index + 1, never).amin(-1) if calm_tiles.shape[-1] else never.expand_as(tiles)
    return torch.minimum(first, tiles)
