"""The parameters of early termination, which any decode policy can have beside its own."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from winnow_kernels.contract.fields import Contract

# As many tiles of 64 tokens as the longest context has.
MAX_PATIENCE: Final = 16_384

DEFAULT_TERMINATION_SCALE: Final = 0.03
DEFAULT_TERMINATION_DIRECTION: Final = 0.01
DEFAULT_TERMINATION_PATIENCE: Final = 4


class EarlyTermination(Contract):
    """Stop reading a selection once the running output has been settled for ``patience`` tiles of 64 tokens in a row.

    Attributes:
        scale: most relative change of the output's norm in a settled tile.
        direction: most change of the output's direction in a settled tile, as 1 - cosine.
    """

    scale: Annotated[float, Field(gt=0, le=1)] = DEFAULT_TERMINATION_SCALE
    direction: Annotated[float, Field(gt=0, le=2)] = DEFAULT_TERMINATION_DIRECTION
    patience: Annotated[int, Field(ge=1, le=MAX_PATIENCE)] = DEFAULT_TERMINATION_PATIENCE
