"""The parameters of ``lowbit_top_p``."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, ValidationInfo, field_validator

from winnow_kernels.contract.fields import MAX_TOKENS, Ratio, Sparse, Tokens, beside_sinks, refuse

WHOLE_ABOVE: Final = 0.999
"""A greater share takes everything."""


class LowBitTopP(Sparse):
    """Attend to the fewest tokens that hold the share ``p`` of each query head's attention, as low-bit keys predict it.

    Attributes:
        p: share of the attention mass; above 0.999 everything is attended to.
        min_tokens: least tokens for each query head, where the context has as many; a KV head reads the union over its
            query heads, which may be several times as many.
        max_tokens: most tokens for each KV head, after the union over its query heads; None for no cap.
    """

    policy: Literal["lowbit_top_p"] = "lowbit_top_p"
    p: Ratio = 0.9
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    max_tokens: Tokens | None = None

    _holds_sinks = field_validator("max_tokens")(beside_sinks)

    @field_validator("max_tokens")
    @classmethod
    def _holds_least(cls, most: int | None, info: ValidationInfo) -> int | None:
        least = info.data.get("min_tokens")
        if most is not None and least is not None and most < least:
            refuse(f"must be at least {least}, min_tokens; it is {most}")
        return most

    @property
    def takes_all(self) -> bool:
        """Whether no token is left out but by a cap."""
        return self.p > WHOLE_ABOVE
