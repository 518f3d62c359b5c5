"""Bounds on what policies read, whoever sets them: an operator for a key, or a request that has its policy chosen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from winnow_kernels.contract.fields import MAX_TOKENS, PAGE_TOKENS, Parameters
from winnow_kernels.policies.registry import DECODE_POLICIES, PREFILL_POLICIES


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
# What was read from JSON has a list.
_Names = Annotated[tuple[str, ...], Field(min_length=1, strict=False)]


class PolicyBounds(BaseModel):
    """Bounds on decode and prefill policies.

    Attributes:
        decode, prefill: the policies allowed; None for all. A request that asks for none, and has no default, is dense.
        min_p: lowest share of the attention (``p``).
        min_budget, max_budget: in tokens, of whatever a policy selects: its budget, ``streaming_llm``'s sinks and
            window, ``max_tokens``. A budget holds the sinks: a ``max_budget`` that leaves no room for them
            bounds them, too.
        min_budget_ratio, max_budget_ratio: of budgets that are a ratio. Where a budget has a bound and a ratio has
            none, a ratio is out of bounds.
        early_termination: whether it may be asked for.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    decode: Annotated[_Names, *_kinds(DECODE_POLICIES)] | None = None
    prefill: Annotated[_Names, *_kinds(PREFILL_POLICIES)] | None = None
    min_p: Ratio | None = None
    min_budget: Tokens | None = None
    max_budget: Tokens | None = None
    min_budget_ratio: Ratio | None = None
    max_budget_ratio: Ratio | None = None
    early_termination: bool = True

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for name in ("budget", "budget_ratio"):
            lowest, highest = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if lowest is not None and highest is not None and lowest > highest:
                raise ValueError(f"min_{name} must be at most max_{name}")
        return self

    def forbidden_kind(self, decode: Parameters, prefill: Parameters) -> tuple[str, str] | None:
        """Return the field that names a policy which is not allowed, and what it must be; None if both are."""
        for phase, parameters, allowed in (("decode", decode, self.decode), ("prefill", prefill, self.prefill)):
            asked = getattr(parameters, "policy", "")
            if allowed is not None and asked not in allowed:
                return f"attention.{phase}.policy", f"must be one of {', '.join(allowed)}; it is {asked}"
        return None

    def violations_of(self, decode: Parameters, prefill: Parameters, asked: dict[str, Any]) -> Iterator[Violation]:
        """Yield the fields out of bounds.

        Args:
            decode: what is asked of decode.
            prefill: the same of prefill.
            asked: the whole policy as JSON has it; what a violation corrects.
        """
        for phase, parameters in (("decode", decode), ("prefill", prefill)):
            fields = type(parameters).model_fields
            yield from self._of_numbers(asked[phase], fields, f"attention.{phase}", parameters.reserved)
        if not self.early_termination and "early_termination" in asked:
            yield Violation(asked, "attention", "early_termination", "must be absent", None)

    def allow(self, decode: Parameters, prefill: Parameters, asked: dict[str, Any]) -> bool:
        """Return whether a policy is within the bounds; arguments as for ``violations_of``."""
        is_kind_allowed = self.forbidden_kind(decode, prefill) is None
        return is_kind_allowed and next(self.violations_of(decode, prefill, asked), None) is None

    def _of_numbers(
        self, part: dict[str, Any], fields: Collection[str], path: str, reserved: int
    ) -> Iterator[Violation]:
        yield from out_of_range(part, path, "p", self.min_p, None)
        yield from out_of_range(part, path, "budget", self.min_budget, self.max_budget)
        if "budget_ratio" in part:
            yield from self._of_ratio(part, path, reserved)
        if "max_tokens" in fields:
            if self.max_budget is not None and "max_tokens" not in part:
                yield Violation(part, path, "max_tokens", f"must be given, at most {self.max_budget}", self.max_budget)
            yield from out_of_range(part, path, "max_tokens", self.min_budget, self.max_budget)
            # A cap holds what is read at least.
            yield from out_of_range(part, path, "min_tokens", None, self.max_budget)
        most_sinks = self._most_sinks(part, reserved)
        if "window" in fields:
            sinks = min(part["sinks"], most_sinks)
            lowest, highest = (None if bound is None else bound - sinks for bound in (self.min_budget, self.max_budget))
            yield from out_of_range(part, path, "window", lowest, highest)
        if part.get("sinks", 0) > most_sinks:
            rule = f"must be at most {most_sinks}, for max_budget ({self.max_budget}) holds them and what is recent"
            yield Violation(part, path, "sinks", rule, most_sinks)

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

    def _of_ratio(self, part: dict[str, Any], path: str, reserved: int) -> Iterator[Violation]:
        if self._needs_tokens:
            budget = self.max_budget or max(self.min_budget or 0, part["sinks"] + reserved)
            yield Violation(part, path, "budget_ratio", "must be a budget in tokens", None)
            yield Violation(part, path, "budget", "must be given", budget)
        else:
            yield from out_of_range(part, path, "budget_ratio", self.min_budget_ratio, self.max_budget_ratio)


@dataclass(frozen=True)
class Violation:
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


def out_of_range(
    part: dict[str, Any], path: str, field: str, lowest: float | None, highest: float | None
) -> Iterator[Violation]:
    """Yield what is out of bounds of a field that may be absent."""
    value = part.get(field)
    if value is None:
        return
    if lowest is not None and value < lowest:
        yield Violation(part, path, field, f"must be at least {lowest}", lowest)
    if highest is not None and value > highest:
        yield Violation(part, path, field, f"must be at most {highest}", highest)
