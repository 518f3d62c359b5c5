"""What is trained when: lengths and the learning rate, by the share of the planned time that is over."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Lengths drawn by weight until a share of the time is over."""

    until: float
    lengths: dict[int, float]


STAGES = (
    Stage(0.12, {1024: 1.0, 2048: 1.0}),
    Stage(0.30, {1024: 0.4, 2048: 1.0, 4096: 1.2}),
    Stage(0.50, {2048: 0.6, 4096: 1.0, 8192: 1.4}),
    Stage(0.70, {2048: 0.4, 4096: 0.7, 8192: 1.2, 16384: 1.2}),
    Stage(1.00, {2048: 0.3, 4096: 0.5, 8192: 0.9, 16384: 1.0, 32768: 1.4}),
)
"""Formats are learned where they are cheap; positions beyond the base model's 8,192 get the most of the time."""


@dataclass(frozen=True)
class Schedule:
    """The plan of a whole training, over as many legs as it takes.

    Attributes:
        total_seconds: what all legs together may take.
        rate: the highest learning rate.
        warm_up: steps at the start and after a resumption without optimizer state.
        decay_share: the last part of the time, in which the rate falls linearly to a fiftieth.
        stages: lengths over time.
        seed: what is drawn.
    """

    total_seconds: float
    rate: float = 1e-3
    warm_up: int = 40
    decay_share: float = 0.6
    stages: tuple[Stage, ...] = STAGES
    seed: int = 0

    def share(self, seconds: float) -> float:
        """The share of the time that is over, at most 1."""
        return min(1.0, seconds / self.total_seconds)

    def length(self, step: int, seconds: float) -> int:
        """Tokens of each row of ``step``."""
        share = self.share(seconds)
        lengths = next(stage for stage in self.stages if share <= stage.until).lengths
        return random.Random(f"{self.seed}/length/{step}").choices(list(lengths), list(lengths.values()))[0]

    def rate_at(self, seconds: float, warm_steps: int) -> float:
        """The learning rate; ``warm_steps`` counts from when the optimizer was new."""
        falling = max(0.02, (1 - self.share(seconds)) / self.decay_share)
        return self.rate * min(1.0, (warm_steps + 1) / self.warm_up, falling)
