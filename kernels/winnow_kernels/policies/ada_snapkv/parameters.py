"""The parameters of Ada-SnapKV."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from winnow_kernels.policies.snapkv.parameters import Voted


class AdaSnapKV(Voted):
    """SnapKV with more budget for KV heads whose votes are spread out; ``budget`` and ``budget_ratio`` are their mean.

    Attributes:
        floor: the share of the mean that every KV head has for itself.
    """

    policy: Literal["ada_snapkv"] = "ada_snapkv"
    floor: Annotated[float, Field(ge=0, le=1)] = 0.2
