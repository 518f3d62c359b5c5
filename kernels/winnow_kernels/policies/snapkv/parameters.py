"""The parameters of SnapKV, and what policies share in which an observation window votes."""

from __future__ import annotations

import operator
from typing import Annotated, Final, Literal, Self

from pydantic import Field, ValidationInfo, field_validator

from winnow_kernels.contract.fields import PAGE_TOKENS, Budgeted, ModelFacts, Window, refuse

MAX_KERNEL_SIZE: Final = 63


class Voted(Budgeted):
    """The votes of an observation window, max-pooled over neighbouring tokens.

    Attributes:
        release: whether the memory of the prompt's other tokens is given back. The prompt then enters no prefix cache.
    """

    kernel_size: Annotated[int, Field(ge=1, le=MAX_KERNEL_SIZE)] = 5
    observation_window: Window = 32
    # Left out where it is false: runtimes that do not know it serve all other policies.
    release: bool = Field(default=False, exclude_if=operator.not_)

    @field_validator("kernel_size")
    @classmethod
    def _odd(cls, size: int) -> int:
        if size % 2 == 0:
            refuse("must be odd")
        return size

    @field_validator("observation_window")
    @classmethod
    def _below_budget(cls, window: int, info: ValidationInfo) -> int:
        budget, sinks = info.data.get("budget"), info.data.get("sinks", 0)
        if budget is not None and window + sinks >= budget:
            refuse(
                f"must be less than {budget - sinks}: the budget ({budget}) also holds {sinks} sinks; it is {window}"
            )
        return window

    def tokens(self, prompt_length: int) -> int:
        """Return how many tokens of the prompt a KV head keeps: window and sinks even if they are more."""
        return max(self.part_of(prompt_length), self.observation_window + self.sinks)

    @property
    def reserved(self) -> int:
        return max(PAGE_TOKENS, self.observation_window + 1)

    @property
    def releases_prompt(self) -> bool:
        return self.release

    @property
    def observed(self) -> int:
        return self.observation_window

    def for_model(self, model: ModelFacts) -> Self:
        model.check_length("observation_window", self.observation_window)
        return self


class SnapKV(Voted):
    """Attend to the prompt tokens that the last ``observation_window`` of them voted for, and to what is decoded."""

    policy: Literal["snapkv"] = "snapkv"
