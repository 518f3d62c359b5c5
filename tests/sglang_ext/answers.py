"""Whether two answers are equal as far as rounding lets them be."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

# Log-probabilities of the same tokens, computed in batches of other shapes, differ by rounding.
TOLERANCE = 2e-3
# Rounding can also decide between two tokens of about equal score: another token in a selection of a hundred. Where a
# request gets another's policy, tokens part, or log-probabilities by tenths.
TOLERANCE_OF_SELECTIONS = 5e-2


@dataclass(frozen=True)
class Step:
    """One generated token, and how far its runner-up was behind in log-probability."""

    token: int
    logprob: float
    gap: float


def steps(answer: Any) -> list[Step]:
    """Return what was generated; the request asked for ``LOGPROBS``."""
    information = answer["meta_info"]
    return [
        Step(token, logprob, best[0][0] - best[1][0])
        for (logprob, token, _), best in zip(
            information["output_token_logprobs"], information["output_top_logprobs"], strict=True
        )
    ]


LOGPROBS: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2}


def equal_steps(answer: Any, expected: Any, tolerance: float) -> int:
    """Return for how many tokens ``answer`` follows ``expected``: up to where two tokens were about equally likely.

    Raises:
        AssertionError: they part where they should not, or the log-probability of a common token differs.
    """
    wanted = steps(expected)
    for i, (ours, theirs) in enumerate(zip(steps(answer), wanted, strict=True)):
        if ours.token != theirs.token:
            assert theirs.gap < tolerance, (i, ours, theirs)
            return i
        assert abs(ours.logprob - theirs.logprob) < tolerance, (i, ours, theirs)
    return len(wanted)


def equal_tokens(answer: Any, expected: Any, tolerance: float) -> int:
    """Return for how many tokens ``answer``, which has no log-probabilities, follows ``expected``, which has them.

    Raises:
        AssertionError: they part where two tokens were not about equally likely.
    """
    wanted = steps(expected)
    for i, (token, theirs) in enumerate(zip(answer["output_ids"], wanted, strict=True)):
        if token != theirs.token:
            assert theirs.gap < tolerance, (i, token, theirs)
            return i
    return len(wanted)


def prompt_of(length: int, seed: int, vocabulary: int) -> list[int]:
    """Return a prompt that is the same for the same ``seed``."""
    return random.Random(seed).choices(range(2, vocabulary), k=length)
