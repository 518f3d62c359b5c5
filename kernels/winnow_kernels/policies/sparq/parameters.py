"""The parameters of SparQ."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from winnow_kernels.contract.fields import StepBudgeted


class SparQ(StepBudgeted):
    """Attend to the tokens whose keys score highest in the ``channels`` channels in which the query is largest."""

    policy: Literal["sparq"] = "sparq"
    channels: Annotated[int, Field(ge=1, le=256)] = 32
