"""The parameters of PyramidKV."""

from __future__ import annotations

from typing import Literal

from winnow_kernels.policies.snapkv.parameters import Voted


class PyramidKV(Voted):
    """SnapKV with budgets that shrink from layer to layer; ``budget`` and ``budget_ratio`` are the mean over layers.

    The window is SnapKV's. One of 128 tokens reaches far beyond a question: most of its votes are the haystack's.
    """

    policy: Literal["pyramidkv"] = "pyramidkv"
