"""How many tokens a request drafts for its next check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sglang_winnow.round_times import RoundCosts
from winnow_kernels.contract.verification import AUTO, DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS

RESTS: Final = 32
"""Dense steps after which a draft is tried again; twice as many after each trial that did not pay."""
MAX_RESTS: Final = 512
_MEMORY: Final = 0.95
_STOOD: Final = 8.0
_FELL: Final = 1.0
"""What is taken to have stood, and to have fallen, before anything has."""


class DraftLength:
    """As many as asked for, or as many as let checks come to most tokens for their cost, as far as drafts have stood.

    A round has as many passes as its longest draft, so that all who follow what pays draft as many: ``agree`` decides.

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
        return 0 if self._rests else max(0, min(self._tokens, wanted - 1))

    def note(self, drafted: int, stood: int) -> None:
        """Learn from a check that ``stood`` of the tokens that were ``drafted`` stand."""
        self._stood = _MEMORY * self._stood + stood
        self._fell = _MEMORY * self._fell + (stood < drafted)

    def comes_to(self, tokens: int) -> float:
        """Return what a check of so many drafts should come to.

        Drafts are taken to stand with one probability a, whatever the others do: k come to 1 + a + … + aᵏ tokens.
        """
        share = self._stood / (self._stood + self._fell)
        return sum(share**number for number in range(tokens + 1))

    def set(self, tokens: int, *, pays: bool) -> None:
        """Draft so many from now on, or rest if that does not pay."""
        if pays:
            self._tokens, self._next_rests = tokens, RESTS
            return
        # A trial takes as little as possible.
        self._tokens = 1
        self._rests = self._next_rests
        self._next_rests = min(2 * self._next_rests, MAX_RESTS)

    def has_rested(self) -> bool:
        """Let a round pass; return whether the request drafts in it."""
        self._rests = max(0, self._rests - 1)
        return self._rests == 0

    def wake(self) -> None:
        """Rest no more."""
        self._rests = 0


def begin_round(lengths: Sequence[DraftLength]) -> None:
    """Let a round pass for requests that rest: where one of those who follow what pays drafts, all do."""
    following = [length for length in lengths if length.follows]
    have_rested = [length.has_rested() for length in following]
    if any(have_rested):
        for length in following:
            length.wake()


def agree(lengths: Sequence[DraftLength], costs: RoundCosts) -> None:
    """Let those who follow what pays draft as many, after a round: as come to most tokens of all for what rounds cost.

    Where no number is better than a dense step, they rest.

    Args:
        lengths: of the requests that have drafted in the round.
        costs: of rounds of such batches.
    """
    following = [length for length in lengths if length.follows]
    if not following:
        return

    def gain(tokens: int) -> float:
        total = sum(length.comes_to(tokens) for length in following)
        return total / len(following) / (costs.check(tokens) + costs.draft * tokens)

    best = max(range(1, MAX_DRAFT_TOKENS + 1), key=gain)
    pays = gain(best) > 1
    for length in following:
        length.set(best, pays=pays)
