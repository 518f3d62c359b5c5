"""How many tokens a request drafts for its next check."""

from __future__ import annotations

from typing import Final

from winnow_kernels.contract.verification import AUTO, DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS

DRAFT_COST: Final = 0.2
"""What a draft is taken to cost, of what a check costs."""
RESTS: Final = 32
"""Dense steps after which a draft is tried again."""
_MEMORY: Final = 0.95
_STOOD: Final = 8.0
_FELL: Final = 1.0
"""What is taken to have stood, and to have fallen, before anything has."""


class DraftLength:
    """As many as asked for, or as many as let a check come to most tokens for its cost, as far as drafts have stood.

    Drafts are taken to stand with one probability a, whatever the others do. k of them then come to 1 + a + … + aᵏ
    tokens, and cost 1 + ``DRAFT_COST`` · k checks. Where no k is better than a dense step, a request rests.
    """

    def __init__(self, asked: int | str) -> None:
        """``asked`` is ``draft_tokens`` of a policy."""
        self._follows = asked == AUTO
        self._tokens = DEFAULT_DRAFT_TOKENS if isinstance(asked, str) else asked
        self._stood, self._fell = _STOOD, _FELL
        self._rests = 0

    def next(self, wanted: int) -> int:
        """Return how many tokens to draft, 0 for a dense step, where a check should come to ``wanted`` at most."""
        if self._rests > 0:
            self._rests -= 1
            return 0
        return min(self._tokens, wanted - 1)

    def note(self, drafted: int, stood: int) -> None:
        """Learn from a check that ``stood`` of the tokens that were ``drafted`` stand."""
        if not self._follows:
            return
        self._stood = _MEMORY * self._stood + stood
        self._fell = _MEMORY * self._fell + (stood < drafted)
        share = self._stood / (self._stood + self._fell)
        gains = [_gain(share, tokens) for tokens in range(MAX_DRAFT_TOKENS + 1)]
        best = max(range(len(gains)), key=gains.__getitem__)
        self._tokens = max(1, best)
        if best == 0:
            self._rests = RESTS


def _gain(share: float, tokens: int) -> float:
    return sum(share**number for number in range(tokens + 1)) / (1 + DRAFT_COST * tokens)
