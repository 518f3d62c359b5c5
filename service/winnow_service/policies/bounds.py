"""What an operator allows the requests of one key to ask of attention."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.contract.verification import AUTO, MAX_DRAFT_TOKENS
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy
from winnow_kernels.policies.bounds import PolicyBounds, Violation, out_of_range
from winnow_kernels.policies.quality import KL, Top1
from winnow_service.errors import PolicyForbidden


class OnViolation(StrEnum):
    """What becomes of a request whose policy is out of bounds."""

    REFUSE = "refuse"
    CLAMP = "clamp"


class Bounds(PolicyBounds):
    """Bounds on the policies of a key's requests, wherever a policy comes from: the request, a name, a default.

    Attributes:
        on_violation: whether a number out of bounds refuses the request, or is replaced by the bound, which the
            answer tells. A policy that is not among those allowed has no nearest one: it always refuses.
        keep: whether answers that are not dense may be kept for later turns, in a part of the cache of their own.
        verify: whether drafts may be verified. Without it the answer would be another one, so that it is never left
            out: where it is forbidden, it refuses.
        max_draft_tokens: that are drafted at once, at most.
        max_audit: highest share of decode steps that may be audited, each of which costs a dense one.
        max_kl, min_top1: of the quality that is asked for of a policy which the runtime chooses, under load, too.
    """

    on_violation: OnViolation = OnViolation.REFUSE
    keep: bool = True
    verify: bool = True
    max_draft_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)] | None = None
    max_audit: Annotated[float, Field(ge=0, le=1)] | None = None
    max_kl: KL | None = None
    min_top1: Top1 | None = None

    def apply(self, policy: AttentionPolicy) -> tuple[AttentionPolicy, list[str]]:
        """Return ``policy``, or the nearest one within bounds, and what was changed.

        A request whose policy the runtime chooses (``quality``) takes the bounds along.

        Raises:
            PolicyForbidden: it is out of bounds, and the bounds refuse or there is nothing near.
        """
        if policy.quality is None:
            self._check_kinds(policy)
        elif policy.quality.within is not None:
            raise PolicyForbidden("attention.quality.within", "must be absent: this key has bounds of its own")
        asked = policy.model_dump(mode="json", exclude_none=True)
        violations = list(self._violations(policy, asked))
        if violations and self.on_violation is OnViolation.REFUSE:
            raise PolicyForbidden(violations[0].field_path, violations[0].problem)
        if not violations:
            return self._taken_along(policy), []
        for violation in violations:
            violation.correct()
        try:
            return self._taken_along(parse_policy(asked)), [violation.warning for violation in violations]
        except PolicyError as error:
            cause = "" if self.max_budget is None else f" (max_budget of this key is {self.max_budget})"
            raise PolicyForbidden(error.path, error.problem + cause) from None

    def _check_kinds(self, policy: AttentionPolicy) -> None:
        if policy.verify is not None and not self.verify:
            raise PolicyForbidden("attention.verify", "must be absent")
        if (forbidden := self.forbidden_kind(policy.decode, policy.prefill)) is not None:
            raise PolicyForbidden(*forbidden)

    def _taken_along(self, policy: AttentionPolicy) -> AttentionPolicy:
        if policy.quality is None:
            return policy
        within = PolicyBounds(**{name: getattr(self, name) for name in PolicyBounds.model_fields})
        if within == PolicyBounds():
            return policy
        return policy.model_copy(update={"quality": policy.quality.model_copy(update={"within": within})})

    def _violations(self, policy: AttentionPolicy, asked: dict[str, Any]) -> Iterator[Violation]:
        if policy.quality is None:
            yield from self.violations_of(policy.decode, policy.prefill, asked)
        else:
            yield from self._of_quality(asked["quality"])
        if not self.keep and policy.keep:
            yield Violation(asked, "attention", "keep", "must be absent", None)
        if policy.verify is not None:
            yield from self._of_drafts(asked["verify"])
        if policy.audits_next_token:
            yield from out_of_range(asked["audit"], "attention.audit", "share", None, self.max_audit)
        else:
            yield from out_of_range(asked, "attention", "audit", None, self.max_audit)

    def _of_quality(self, part: dict[str, Any]) -> Iterator[Violation]:
        path = "attention.quality"
        # The server's own quality may be another.
        if self.max_kl is not None and "kl" not in part:
            yield Violation(part, path, "kl", f"must be given, at most {self.max_kl}", self.max_kl)
        if self.min_top1 is not None and "top1" not in part:
            yield Violation(part, path, "top1", f"must be given, at least {self.min_top1}", self.min_top1)
        yield from self._within_quality(part, path)
        yield from self._within_quality(part.get("under_load", {}), f"{path}.under_load")

    def _within_quality(self, part: dict[str, Any], path: str) -> Iterator[Violation]:
        yield from out_of_range(part, path, "kl", None, self.max_kl)
        yield from out_of_range(part, path, "top1", self.min_top1, None)

    def _of_drafts(self, part: dict[str, Any]) -> Iterator[Violation]:
        path, most = "attention.verify", self.max_draft_tokens
        if most is not None and part["draft_tokens"] == AUTO:
            yield Violation(part, path, "draft_tokens", f"must be a number, at most {most}", most)
        else:
            yield from out_of_range(part, path, "draft_tokens", None, most)
