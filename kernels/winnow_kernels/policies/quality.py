"""What a request asks for whose policy the runtime chooses: how near to dense attention its answer must be."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, ValidationInfo, field_validator

from winnow_kernels.contract.fields import Contract, refuse
from winnow_kernels.policies.bounds import PolicyBounds

NAME: Final = "auto"
"""Under which a request asks for the server's own quality."""
MAX_KL: Final = 10.0

KL = Annotated[float, Field(gt=0, le=MAX_KL)]
Top1 = Annotated[float, Field(gt=0, le=1)]


class UnderLoad(Contract):
    """What the answer must keep while the server is under load: a lower quality, of the decode policy alone.

    Attributes:
        kl: highest KL then, at least that without load; None if it stays what it is.
        top1: lowest share of equal first tokens then, at most that without load; None if it stays what it is.
    """

    kl: KL | None = None
    top1: Top1 | None = None


class Quality(Contract):
    """Have the runtime choose the cheapest policy of its profile that keeps a quality, by prefill and decode.

    Attributes:
        kl: highest KL(dense ‖ policy) of the next token in nats, a mean over tokens.
        top1: lowest share of the tokens that both rank first. With neither the server's own bound on KL holds.
        under_load: what suffices while the server is under load. Without it a quality that the request names always
            holds, and the server's own goes down to what its operator has set.
        within: bounds on the policies to choose from.
    """

    kl: KL | None = None
    top1: Top1 | None = None
    under_load: UnderLoad | None = Field(default=None, exclude_if=lambda under_load: under_load is None)
    within: PolicyBounds | None = Field(default=None, exclude_if=lambda bounds: bounds is None)

    @field_validator("under_load")
    @classmethod
    def _lower(cls, under_load: UnderLoad | None, info: ValidationInfo) -> UnderLoad | None:
        if under_load is None or not {"kl", "top1"} <= info.data.keys():
            return under_load
        kl, top1 = info.data["kl"], info.data["top1"]
        if under_load.kl is None and under_load.top1 is None:
            refuse("must have kl or top1")
        if under_load.kl is not None and kl is None and top1 is not None:
            refuse("must not have kl: quality.kl is not given, so it bounds nothing")
        if under_load.top1 is not None and top1 is None:
            refuse("must not have top1: quality.top1 is not given, so it bounds nothing")
        if under_load.kl is not None and kl is not None and under_load.kl < kl:
            refuse(f"must have a kl of at least {kl:g}, that of quality")
        if under_load.top1 is not None and top1 is not None and under_load.top1 > top1:
            refuse(f"must have a top1 of at most {top1:g}, that of quality")
        return under_load
