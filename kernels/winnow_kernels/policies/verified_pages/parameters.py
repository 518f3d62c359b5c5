"""The parameters of ``verified_pages``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, ValidationInfo, field_validator

from winnow_kernels.contract.fields import PAGE_TOKENS, Sparse, refuse

MAX_BUDGET: Final = 16_384

_Tokens = Annotated[int, Field(ge=PAGE_TOKENS, le=MAX_BUDGET)]


class VerifiedPages(Sparse):
    """Draft from the pages that held most of the attention of the last checks; for verified requests alone.

    Attributes:
        recency: newest tokens that are always kept, as of the last check.
    """

    drafts_only: ClassVar[bool] = True

    policy: Literal["verified_pages"] = "verified_pages"
    budget: _Tokens = 1024
    recency: _Tokens = 64

    @field_validator("recency")
    @classmethod
    def _within_budget(cls, recency: int, info: ValidationInfo) -> int:
        budget, sinks = info.data.get("budget"), info.data.get("sinks", 0)
        if budget is not None and recency + sinks > budget:
            most = budget - sinks
            refuse(f"must be at most {most}: the budget ({budget}) also holds {sinks} sinks; it is {recency}")
        return recency
