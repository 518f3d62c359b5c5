"""The parameters of QUOKA, which has a policy for decode and one for prefill."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator

from winnow_kernels.contract.fields import MAX_TOKENS, PAGE_TOKENS, Budgeted, ModelFacts, StepBudgeted, refuse


def _default_queries(data: dict[str, Any]) -> int:
    return data.get("block", 0) // 2


class QuokaDecode(StepBudgeted):
    """Attend to the tokens whose keys score highest for the normalised queries of the step."""

    policy: Literal["quoka"] = "quoka"


class QuokaPrefill(Budgeted):
    """Prefill in blocks of queries that share one selection of the tokens before them.

    Attributes:
        block: queries that share a selection.
        queries: how many of a block's queries choose for it; half of the block when not given.
        dense_prefix: leading tokens of the prompt that are prefilled densely.
        recency_ratio: the share of the budget that the tokens right before a block take; 0 as in the paper.
    """

    policy: Literal["quoka"] = "quoka"
    block: Annotated[int, Field(ge=64, le=512, multiple_of=PAGE_TOKENS)] = 128
    queries: Annotated[int, Field(ge=1, le=512)] = Field(default_factory=_default_queries)
    dense_prefix: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    recency_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5

    @field_validator("queries")
    @classmethod
    def _within_block(cls, queries: int, info: ValidationInfo) -> int:
        block = info.data.get("block")
        if block is not None and queries > block:
            refuse(f"must be at most the block ({block})")
        return queries

    def tokens(self, before: int) -> int:
        """Return the budget of a block that ``before`` tokens precede: never less than the sinks."""
        return max(self.sinks, self.part_of(before))

    def recent(self, before: int) -> int:
        """Return how many tokens right before a sparse block that ``before`` tokens precede are always selected."""
        budget = self.tokens(before)
        return min(math.floor(self.recency_ratio * budget), budget - self.sinks)

    def is_dense(self, block_start: int) -> bool:
        """Return whether a block attends to everything before it."""
        return block_start < self.dense_prefix or block_start <= self.tokens(block_start)

    def for_model(self, model: ModelFacts) -> Self:
        model.check_length("dense_prefix", self.dense_prefix)
        return self
