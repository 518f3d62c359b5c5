"""What an operator allows the requests of one key to ask of attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from winnow_kernels.contract.fields import MAX_TOKENS, PAGE_TOKENS, PolicyError
from winnow_kernels.contract.verification import AUTO, MAX_DRAFT_TOKENS
from winnow_kernels.policies.attention_policy import AttentionPolicy, parse_policy
from winnow_kernels.policies.registry import DECODE_POLICIES, PREFILL_POLICIES
from winnow_service.errors import PolicyForbidden


class OnViolation(StrEnum):
    """What becomes of a request whose policy is out of bounds."""

    REFUSE = "refuse"
    CLAMP = "clamp"


def _known(names: tuple[str, ...]) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
    def check(given: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := set(given) - set(names):
            raise ValueError(f"there is no policy {min(unknown)!r}; there are {', '.join(names)}")
        return given

    return check


def _kinds(names: tuple[str, ...]) -> Any:
    schema = {"type": "array", "minItems": 1, "items": {"type": "string", "enum": list(names)}}
    return (AfterValidator(_known(names)), WithJsonSchema(schema))


Tokens = Annotated[int, Field(ge=PAGE_TOKENS, le=MAX_TOKENS)]
Ratio = Annotated[float, Field(gt=0, le=1)]
_Names = Annotated[tuple[str, ...], Field(min_length=1)]


class Bounds(BaseModel):
    """Bounds on the policies of a key's requests, wherever a policy comes from: the request, a name, a default.

    Attributes:
        on_violation: whether a number out of bounds refuses the request, or is replaced by the bound, which the
            answer tells. A policy that is not among those allowed has no nearest one: it always refuses.
        decode, prefill: the policies allowed; None for all. A request that asks for none, and has no default, is dense.
        min_p: lowest share of the attention for ``tactic``.
        min_budget, max_budget: in tokens, of whatever a policy selects: its budget, ``streaming_llm``'s sinks and
            window, ``tactic``'s ``max_tokens``. A budget holds the sinks: a ``max_budget`` that leaves no room for them
            bounds them, too.
        min_budget_ratio, max_budget_ratio: of budgets that are a ratio. Where a budget has a bound and a ratio has
            none, a ratio is out of bounds.
        early_termination: whether it may be asked for.
        keep: whether answers that are not dense may be kept for later turns, in a part of the cache of their own.
        verify: whether drafts may be verified. Without it the answer would be another one, so that it is never left
            out: where it is forbidden, it refuses.
        max_draft_tokens: that are drafted at once, at most.
        max_audit: highest share of decode steps that may be audited, each of which costs a dense one.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    on_violation: OnViolation = OnViolation.REFUSE
    decode: Annotated[_Names, *_kinds(DECODE_POLICIES)] | None = None
    prefill: Annotated[_Names, *_kinds(PREFILL_POLICIES)] | None = None
    min_p: Ratio | None = None
    min_budget: Tokens | None = None
    max_budget: Tokens | None = None
    min_budget_ratio: Ratio | None = None
    max_budget_ratio: Ratio | None = None
    early_termination: bool = True
    keep: bool = True
    verify: bool = True
    max_draft_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)] | None = None
    max_audit: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for name in ("budget", "budget_ratio"):
            lowest, highest = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if lowest is not None and highest is not None and lowest > highest:
                raise ValueError(f"min_{name} must be at most max_{name}")
        return self

    def apply(self, policy: AttentionPolicy) -> tuple[AttentionPolicy, list[str]]:
        """Return ``policy``, or the nearest one within bounds, and what was changed.

        Raises:
            PolicyForbidden: it is out of bounds, and the bounds refuse or there is nothing near.
        """
        self._check_kinds(policy)
        asked = policy.model_dump(mode="json", exclude_none=True)
        violations = list(self._violations(policy, asked))
        if violations and self.on_violation is OnViolation.REFUSE:
            raise PolicyForbidden(violations[0].field_path, violations[0].problem)
        if not violations:
            return policy, []
        for violation in violations:
            violation.correct()
        try:
            return parse_policy(asked), [violation.warning for violation in violations]
        except PolicyError as error:
            cause = "" if self.max_budget is None else f" (max_budget of this key is {self.max_budget})"
            raise PolicyForbidden(error.path, error.problem + cause) from None

    def _check_kinds(self, policy: AttentionPolicy) -> None:
        if policy.verify is not None and not self.verify:
            raise PolicyForbidden("attention.verify", "must be absent")
        for phase, asked, allowed in (
            ("decode", policy.decode.policy, self.decode),
            ("prefill", policy.prefill.policy, self.prefill),
        ):
            if allowed is not None and asked not in allowed:
                raise PolicyForbidden(
                    f"attention.{phase}.policy", f"must be one of {', '.join(allowed)}; it is {asked}"
                )

    def _violations(self, policy: AttentionPolicy, asked: dict[str, Any]) -> Iterator[_Violation]:
        for phase, parameters in (("decode", policy.decode), ("prefill", policy.prefill)):
            fields = type(parameters).model_fields
            yield from self._of_numbers(asked[phase], fields, f"attention.{phase}", parameters.reserved)
        if not self.early_termination and "early_termination" in asked:
            yield _Violation(asked, "attention", "early_termination", "must be absent", None)
        if not self.keep and policy.keep:
            yield _Violation(asked, "attention", "keep", "must be absent", None)
        if policy.verify is not None:
            yield from self._of_drafts(asked["verify"])
        yield from _out_of_range(asked, "attention", "audit", None, self.max_audit)

    def _of_drafts(self, part: dict[str, Any]) -> Iterator[_Violation]:
        path, most = "attention.verify", self.max_draft_tokens
        if most is not None and part["draft_tokens"] == AUTO:
            yield _Violation(part, path, "draft_tokens", f"must be a number, at most {most}", most)
        else:
            yield from _out_of_range(part, path, "draft_tokens", None, most)

    def _of_numbers(
        self, part: dict[str, Any], fields: Collection[str], path: str, reserved: int
    ) -> Iterator[_Violation]:
        yield from _out_of_range(part, path, "p", self.min_p, None)
        yield from _out_of_range(part, path, "budget", self.min_budget, self.max_budget)
        if "budget_ratio" in part:
            yield from self._of_ratio(part, path, reserved)
        if "max_tokens" in fields:
            if self.max_budget is not None and "max_tokens" not in part:
                yield _Violation(part, path, "max_tokens", f"must be given, at most {self.max_budget}", self.max_budget)
            yield from _out_of_range(part, path, "max_tokens", self.min_budget, self.max_budget)
            # A cap holds what is read at least.
            yield from _out_of_range(part, path, "min_tokens", None, self.max_budget)
        most_sinks = self._most_sinks(part, reserved)
        if "window" in fields:
            sinks = min(part["sinks"], most_sinks)
            lowest, highest = (None if bound is None else bound - sinks for bound in (self.min_budget, self.max_budget))
            yield from _out_of_range(part, path, "window", lowest, highest)
        if part.get("sinks", 0) > most_sinks:
            rule = f"must be at most {most_sinks}, for max_budget ({self.max_budget}) holds them and what is recent"
            yield _Violation(part, path, "sinks", rule, most_sinks)

    def _most_sinks(self, part: dict[str, Any], reserved: int) -> int:
        """Return how many sinks a budget within the bounds has room for."""
        if self.max_budget is None or ("budget_ratio" in part and not self._needs_tokens):
            return MAX_TOKENS
        return max(0, self.max_budget - reserved)

    @property
    def _needs_tokens(self) -> bool:
        """Whether a budget must be in tokens, for there is no bound on a ratio."""
        return (self.max_budget is not None and self.max_budget_ratio is None) or (
            self.min_budget is not None and self.min_budget_ratio is None
        )

    def _of_ratio(self, part: dict[str, Any], path: str, reserved: int) -> Iterator[_Violation]:
        if self._needs_tokens:
            budget = self.max_budget or max(self.min_budget or 0, part["sinks"] + reserved)
            yield _Violation(part, path, "budget_ratio", "must be a budget in tokens", None)
            yield _Violation(part, path, "budget", "must be given", budget)
        else:
            yield from _out_of_range(part, path, "budget_ratio", self.min_budget_ratio, self.max_budget_ratio)


@dataclass(frozen=True)
class _Violation:
    """One field out of bounds, and the value within them; None to leave the field out."""

    part: dict[str, Any]
    path: str
    field: str
    rule: str
    value: float | None

    @property
    def field_path(self) -> str:
        return f"{self.path}.{self.field}"

    @property
    def problem(self) -> str:
        return f"{self.rule}; it is {self.part[self.field]}" if self._is_scalar else self.rule

    @property
    def warning(self) -> str:
        became = "left out" if self.value is None else f"set to {self.value}"
        return f"{self.field_path} was {became}: it {self.rule} (bounds of this key)"

    def correct(self) -> None:
        if self.value is None:
            del self.part[self.field]
        else:
            self.part[self.field] = self.value

    @property
    def _is_scalar(self) -> bool:
        return isinstance(self.part.get(self.field), int | float)


def _out_of_range(
    part: dict[str, Any], path: str, field: str, lowest: float | None, highest: float | None
) -> Iterator[_Violation]:
    value = part.get(field)
    if value is None:
        return
    if lowest is not None and value < lowest:
        yield _Violation(part, path, field, f"must be at least {lowest}", lowest)
    if highest is not None and value > highest:
        yield _Violation(part, path, field, f"must be at most {highest}", highest)
