"""What the parameters of policies are made of: their base classes, shared fields and bounds.

All lengths, budgets and windows are in tokens. A budget is a number of KV tokens for each KV head and step and holds
what a policy always keeps; a budget ratio is of the tokens cached before that step or block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

PAGE_TOKENS: Final = 16
# As many tokens as the longest context that is served anywhere.
MAX_TOKENS: Final = 1_048_576
MAX_WINDOW: Final = 4096
MAX_LAYERS: Final = 1024

DEFAULT_BUDGET: Final = 1024
DEFAULT_SINKS: Final = 16

MAX_MESSAGE_CHARACTERS: Final = 400


class PolicyError(ValueError):
    """A policy that cannot be served. The message is short ASCII: the field's path and what it must be.

    Attributes:
        path: the field, such as ``attention.decode.budget``.
        problem: what is wrong with it, such as ``must be greater than or equal to 16``.
    """

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}"[:MAX_MESSAGE_CHARACTERS])


@dataclass(frozen=True)
class ModelFacts:
    """What a policy is checked against.

    Attributes:
        layers: how many the model has.
        context_length: the model's, in tokens.
        delta_layers: the Δ-layers calibrated for this model; None if it has not been calibrated.
    """

    layers: int
    context_length: int
    delta_layers: Sequence[int] | None

    def check_length(self, field: str, tokens: int) -> None:
        """Refuse a field that is longer than any context of the model.

        Raises:
            PolicyError: it is.
        """
        if tokens > self.context_length:
            raise PolicyError(field, f"must be at most {self.context_length}, the model's context length")


class Contract(BaseModel):
    """What clients write: strict, and frozen once read."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, hide_input_in_errors=True
    )


class Parameters(Contract):
    """The parameters of a policy: what a request says of it, and what references and kernels are given.

    Attributes:
        drafts_only: whether it serves verified requests alone.
    """

    drafts_only: ClassVar[bool] = False

    @property
    def reserved(self) -> int:
        """Tokens that a budget must have beside the sinks."""
        return PAGE_TOKENS

    @property
    def observed(self) -> int:
        """Last tokens of the prompt whose queries the policy must see: they are computed even if they are cached."""
        return 0

    @property
    def releases_prompt(self) -> bool:
        """Whether the memory of what will not be read again of the prompt is given back."""
        return False

    def for_model(self, model: ModelFacts) -> Self:
        """Return the parameters as the model runs them.

        Raises:
            PolicyError: the model cannot serve them; the path is the field's name.
        """
        del model
        return self

    def at_places(self, layers: Sequence[int]) -> Self:
        """Return the parameters as a GPU reads them, where a layer is known by its place among those that count there.

        Args:
            layers: the numbers of the layers on which policies act, ascending; the first has place 0.
        """
        del layers
        return self

    def warnings(self) -> list[str]:
        """Return what the client should know of parameters that are served all the same."""
        return []


def refuse(problem: str) -> NoReturn:
    """Refuse a field in a validator."""
    raise PydanticCustomError("policy", "{problem}", {"problem": problem})


Tokens = Annotated[int, Field(ge=PAGE_TOKENS, le=MAX_TOKENS)]
Window = Annotated[int, Field(ge=1, le=MAX_WINDOW)]
Ratio = Annotated[float, Field(gt=0, le=1)]
LayerCount = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
Layer = Annotated[int, Field(ge=0, lt=MAX_LAYERS)]


class Sparse(Parameters):
    """What every sparse policy has.

    Attributes:
        sinks: first tokens of the context, always attended to, inside the budget. The softmax has to put its mass
            somewhere: many models put most of it on the first token wherever nothing else matters (Xiao et al.,
            "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453, section 3.1), and a selection
            that leaves it out gives everything else too much weight. The papers, with 0, leave it to the selection.
    """

    sinks: Annotated[int, Field(ge=0, le=MAX_WINDOW)] = DEFAULT_SINKS


def beside_sinks(budget: int | None, info: ValidationInfo) -> int | None:
    """Refuse a budget without room for the sinks and the newest page; a validator."""
    sinks = info.data.get("sinks")
    if budget is not None and sinks is not None and budget < sinks + PAGE_TOKENS:
        refuse(f"must be at least {sinks + PAGE_TOKENS}: it holds {sinks} sinks and the newest page; it is {budget}")
    return budget


def _default_budget(data: dict[str, Any]) -> int | None:
    return DEFAULT_BUDGET if data.get("budget_ratio") is None else None


class Budgeted(Sparse):
    """Either ``budget`` tokens or a ``budget_ratio`` of those cached; a ratio takes the place of the default budget."""

    budget_ratio: Ratio | None = None
    budget: Tokens | None = Field(default_factory=_default_budget)

    @field_validator("budget")
    @classmethod
    def _exactly_one(cls, budget: int | None, info: ValidationInfo) -> int | None:
        ratio = info.data.get("budget_ratio")
        if budget is not None and ratio is not None:
            refuse("must not be given together with budget_ratio")
        if budget is None and ratio is None and "budget_ratio" in info.data:
            refuse("must be given when budget_ratio is not")
        return beside_sinks(budget, info)

    def part_of(self, tokens: int) -> int:
        """Return the budget, or the ratio's part of ``tokens``, rounded up."""
        return self.budget if self.budget is not None else math.ceil((self.budget_ratio or 0.0) * tokens)


class StepBudgeted(Budgeted):
    """A budget of each decode step, of all that is cached then."""

    def tokens(self, cached: int) -> int:
        """Return the budget when ``cached`` tokens are cached, at least the sinks and the step's own token."""
        own = 0 if self.budget_ratio is None else 1
        return max(self.part_of(cached) + own, self.sinks + 1)
