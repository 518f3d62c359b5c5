"""What policies declare that have a budget of each decode step, in tokens or as a ratio of the context."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from winnow_kernels.contract.fields import StepBudgeted
from winnow_kernels.decode.declaration import ALWAYS, Declaration
from winnow_kernels.decode.gpu_rows import Columns, OwnParameters

B = TypeVar("B", bound=StepBudgeted)


class StepBudgetDeclaration(Declaration[B]):
    """A policy whose KV heads read ``StepBudgeted.tokens`` at each step.

    Attributes:
        whole_share: from this share of the context on, a ratio reads all of it.
    """

    columns = Columns(("budget",), of_ratio="budget")
    whole_share: ClassVar[float] = 1.0

    def budget(self, parameters: B, prompt_length: int, length: int, page_size: int) -> int:
        return parameters.tokens(length - 1)

    def covered_until(self, parameters: B, prompt_length: int, page_size: int) -> int:
        if parameters.budget_ratio is not None:
            return ALWAYS if parameters.budget_ratio >= self.whole_share else 0
        return self.covered_by(parameters.tokens(prompt_length - 1))

    def covered_by(self, tokens: int) -> int:
        """Return the longest context that a KV head reads whole that may read ``tokens``."""
        return tokens

    def own_parameters(self, parameters: B, prompt_length: int, page_size: int) -> OwnParameters:
        return OwnParameters({"budget": parameters.budget or 0}, ratio=parameters.budget_ratio or 0.0)
