"""What a request asks for whose policy the runtime chooses: how near to dense attention its answer must be."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from winnow_kernels.contract.fields import Contract
from winnow_kernels.policies.bounds import PolicyBounds

NAME: Final = "auto"
"""Under which a request asks for the server's own quality."""
MAX_KL: Final = 10.0

KL = Annotated[float, Field(gt=0, le=MAX_KL)]
Top1 = Annotated[float, Field(gt=0, le=1)]


class Quality(Contract):
    """Have the runtime choose the cheapest policy of its profile that keeps a quality, by prefill and decode.

    Attributes:
        kl: highest KL(dense ‖ policy) of the next token in nats, a mean over tokens.
        top1: lowest share of the tokens that both rank first. With neither the server's own bound on KL holds.
        within: bounds on the policies to choose from.
    """

    kl: KL | None = None
    top1: Top1 | None = None
    within: PolicyBounds | None = Field(default=None, exclude_if=lambda bounds: bounds is None)
