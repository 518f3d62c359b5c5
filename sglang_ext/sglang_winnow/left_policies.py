"""Policies that the server chooses no more, because audits of live traffic show that they break their promise.

What a chosen policy promises is a share of the attention (``Choice.promised_share``). An answer of it that was audited
tells the share it held: a number from 0 to 1, a mean over query heads, layers and audited steps. The promise is broken
where answers hold on average ``TOLERANCE`` less than promised.

Whether they do is decided by a bet against it (a test by betting, Waudby-Smith and Ramdas 2024). With f = promised -
``TOLERANCE`` each answer multiplies the capital by 1 + (f - share) / (2 (1 - f)), which is between 1/2 and 10.5. As
long as answers hold f or more on average, whatever their spread, capital does not grow on average. It begins anew at 1
whenever it falls below: an e-detector (Shin, Ramdas and Rinaldo 2023). A policy that holds exactly f sets it off once
in ``1 / RISK`` audited answers on average, and one that keeps its promise almost never.

A policy that was left is not chosen again until the server is restarted: a wrong profile, or a fault, does not go away
by waiting. Audits are of decode steps, so it is decode policies that are left, after whichever prefill.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Final

from sglang_winnow.metrics import LEFT_POLICIES, METRICS
from sglang_winnow.profile_parts import decoded
from winnow_kernels.policies.attention_policy import AttentionPolicy

# Of the attention. The alert WinnowPromiseBroken has the same.
TOLERANCE: Final = 0.05
RISK: Final = 1e-6
MIN_ANSWERS: Final = 20
"""A single conversation, or a few, decide nothing for all others."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Left:
    """A policy that was left, and why.

    Attributes:
        policy: what it does in decode; its prefill is dense.
        answers: audited ones that decided it.
        true_share: of the attention that they held, their mean.
        promised: the share that they promised, their mean.
    """

    policy: AttentionPolicy
    answers: int
    true_share: float
    promised: float

    def told(self) -> dict[str, Any]:
        """Return what answers say of it."""
        part = self.policy.model_dump(mode="json", exclude_none=True, include={"decode", "early_termination"})
        share, promised = round(self.true_share, 6), round(self.promised, 6)
        return part | {"answers": self.answers, "true_share": share, "promised": promised}


@dataclass
class _Evidence:
    """What audited answers of a policy say against its promise, since they last said nothing.

    Attributes:
        capital: its logarithm, at least 0.
        answers: how many there were.
        shares: that they held, their sum.
        promised: the sum of what they promised.
    """

    capital: float = 0.0
    answers: int = 0
    shares: float = 0.0
    promised: float = 0.0

    def add(self, share: float, promised: float) -> None:
        floor = promised - TOLERANCE
        capital = self.capital + math.log1p((floor - share) / (2 * (1 - floor)))
        if capital <= 0:
            self.capital, self.answers, self.shares, self.promised = 0.0, 0, 0.0, 0.0
            return
        self.capital = capital
        self.answers += 1
        self.shares += share
        self.promised += promised

    @property
    def is_broken(self) -> bool:
        return self.answers >= MIN_ANSWERS and self.capital >= -math.log(RISK)


class LeftPolicies:
    """Which policies one scheduler process has left, and what is known against the others."""

    def __init__(self) -> None:
        self._evidence: dict[AttentionPolicy, _Evidence] = {}
        self._left: dict[AttentionPolicy, Left] = {}

    def find(self, policy: AttentionPolicy) -> Left | None:
        """Return why a policy was left; None if it was not."""
        return self._left.get(decoded(policy))

    def note(self, policy: AttentionPolicy, share: float, promised: float) -> None:
        """Note an audited answer of a policy that was chosen, and leave the policy if its promise is broken.

        Args:
            policy: of the answer.
            share: of the attention that it held, from 0 to 1.
            promised: what it promised. Up to ``TOLERANCE``, nothing can break it.
        """
        part = decoded(policy)
        if part in self._left or promised <= TOLERANCE:
            return
        evidence = self._evidence.setdefault(part, _Evidence())
        evidence.add(share, promised)
        if evidence.is_broken:
            count = evidence.answers
            self._leave(Left(part, count, evidence.shares / count, evidence.promised / count))

    def _leave(self, left: Left) -> None:
        self._left[left.policy] = left
        del self._evidence[left.policy]
        METRICS.add(LEFT_POLICIES, policy=left.policy.decode.policy)
        logger.warning(
            "Winnow chooses %s no more, until the server is restarted: %d audited answers held %.3f of the attention on"
            " average, and %.3f was promised.",
            left.policy.canonical(),
            left.answers,
            left.true_share,
            left.promised,
        )


LEFT: Final = LeftPolicies()
