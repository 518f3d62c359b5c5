"""How many tokens a request drafts for its next check."""

from __future__ import annotations

from typing import Final

from sglang_winnow.round_times import ASSUMED, RoundCosts
from winnow_kernels.contract.verification import AUTO, DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS

RESTS: Final = 32
"""Dense steps after which a draft is tried again; twice as many after each trial that did not pay."""
MAX_RESTS: Final = 512
_MEMORY: Final = 0.95
_STOOD: Final = 8.0
_FELL: Final = 1.0
"""What is taken to have stood, and to have fallen, before anything has."""


class DraftLength:
    """As many as asked for, or as many as let a check come to most tokens for its cost, as far as drafts have stood.

    Drafts are taken to stand with one probability a, whatever the others do. k of them then come to 1 + a + … + aᵏ
    tokens, for the cost of k drafts and a check. Where no k is better than a dense step, a request rests.

    Attributes:
        follows: whether the number follows what has stood and what it costs.
    """

    def __init__(self, asked: int | str) -> None:
        """``asked`` is ``draft_tokens`` of a policy."""
        self.follows = asked == AUTO
        self._tokens = DEFAULT_DRAFT_TOKENS if isinstance(asked, str) else asked
        self._stood, self._fell = _STOOD, _FELL
        self._rests = 0
        self._next_rests = RESTS

    def next(self, wanted: int) -> int:
        """Return how many tokens to draft, 0 for a dense step, where a check should come to ``wanted`` at most."""
        if self._rests > 0:
            self._rests -= 1
            return 0
        return min(self._tokens, wanted - 1)

    def note(self, drafted: int, stood: int, costs: RoundCosts = ASSUMED) -> None:
        """Learn from a check that ``stood`` of the tokens that were ``drafted`` stand, and what rounds cost."""
        if not self.follows:
            return
        self._stood = _MEMORY * self._stood + stood
        self._fell = _MEMORY * self._fell + (stood < drafted)
        share = self._stood / (self._stood + self._fell)
        best = max(range(1, MAX_DRAFT_TOKENS + 1), key=lambda tokens: _gain(share, tokens, costs))
        self._tokens = best
        if _gain(share, best, costs) > 1:
            self._next_rests = RESTS
            return
        # A trial takes as little as possible.
        self._tokens = 1
        self._rests = self._next_rests
        self._next_rests = min(2 * self._next_rests, MAX_RESTS)


def _gain(share: float, tokens: int, costs: RoundCosts) -> float:
    """Return how many times as fast rounds of so many drafts are as dense steps."""
    return sum(share**number for number in range(tokens + 1)) / (costs.check + costs.draft * tokens)
