"""The parameters of ``lowbit_top_k``."""

from __future__ import annotations

from typing import Literal

from winnow_kernels.contract.fields import StepBudgeted


class LowBitTopK(StepBudgeted):
    """Attend to the tokens that hold most of the attention, as low-bit keys predict it, mean over a group's heads."""

    policy: Literal["lowbit_top_k"] = "lowbit_top_k"
