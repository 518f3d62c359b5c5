"""How many drafts of each policy stand, where it drafts for ``verify``.

Dense attention answers each prompt greedily. Along that answer each policy says what it would have drafted at each
token; a check lets the drafts stand up to the first that is not the answer's. What came before a draft is forced: it
differs from a server's rounds in that the keys of checked tokens are the policy's here, and dense attention's there. A
policy that drafts by what checks have read cannot be measured so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from sglang_winnow.profile_parts import DraftingPolicy, DraftPoint, Drafts
from winnow_evaluation.calibration.parts import Advance, Found, Part
from winnow_evaluation.fidelity.forcing import Forcing

DRAFT_TOKENS: Final = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class DraftsPart(Part):
    """Every way to decode, with every number of drafts."""

    name: ClassVar[str] = "drafts"
    max_prompts: ClassVar[int] = 4

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"draft_tokens": DRAFT_TOKENS}

    def measure(self, length: int, number: int, advance: Advance) -> dict[str, dict[str, Any]]:
        """Return which drafts of each policy are the answer's next tokens, and what its steps read."""
        subject = self.subject
        policies = subject.decodes(length)
        found = {}
        with torch.inference_mode():
            batch = subject.prefilled(length, number, subject.tokens, policies)
            forcing, said = Forcing.greedy(batch, subject.tokens, subject.memory)
            advance("dense")
            for policy in policies:
                outcome = forcing.policy(policy)
                read, context = (int(outcome.counts[name].sum()) for name in ("read_bytes", "context_bytes"))
                found[policy.canonical()] = {
                    "stand": (subject.model.best(outcome.hidden) == said)[0].int().tolist(),
                    "kv_read_ratio": read / context,
                }
                advance(policy.decode.policy)
        return found

    def result(self, found: Found) -> Drafts:
        """Return what a profile has of it."""
        policies = []
        for policy in self.subject.decodes(self.subject.lengths[-1]):
            points = []
            for length in self.subject.lengths:
                of_prompts = [found[length, number].get(policy.canonical()) for number in range(self.prompts)]
                if None not in of_prompts:
                    points += _points(length, of_prompts)
            policies.append(DraftingPolicy(attention=policy, points=tuple(points)))
        return Drafts(prompts=self.prompts, tokens=self.subject.tokens, policies=tuple(policies))


def rounds(stand: Sequence[int], draft_tokens: int) -> tuple[int, int]:
    """Return how many tokens whole rounds of drafts come to, and how many checks.

    Args:
        stand: of each token of an answer, whether the policy's draft behind it is the answer's next token.
        draft_tokens: drafted before each check. A round that would draft beyond the end is none.
    """
    place = checks = 0
    while place + draft_tokens <= len(stand):
        drafts = stand[place : place + draft_tokens]
        standing = next((number for number, stands in enumerate(drafts) if not stands), draft_tokens)
        # Behind the drafts that stand comes the token that the check itself says.
        place += standing + 1
        checks += 1
    return place, checks


def _points(length: int, of_prompts: Sequence[Mapping[str, Any]]) -> list[DraftPoint]:
    read = sum(figures["kv_read_ratio"] for figures in of_prompts) / len(of_prompts)
    points = []
    for draft_tokens in DRAFT_TOKENS:
        tokens, checks = map(sum, zip(*(rounds(own["stand"], draft_tokens) for own in of_prompts), strict=True))
        if checks:
            # A check reads the context once, whatever number of drafts it is of.
            ratio = (draft_tokens * read + 1) * checks / tokens
            points.append(
                DraftPoint(
                    length=length, draft_tokens=draft_tokens, tokens_per_check=tokens / checks, kv_read_ratio=ratio
                )
            )
    return points
