"""The parameters of dense attention: none."""

from __future__ import annotations

from typing import Literal

from winnow_kernels.contract.fields import Parameters


class Dense(Parameters):
    """Attend to every token."""

    policy: Literal["dense"] = "dense"


class DensePrefill(Parameters):
    """Attend to every token before each query."""

    policy: Literal["dense"] = "dense"
