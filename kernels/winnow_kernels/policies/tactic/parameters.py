"""The parameters of Tactic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, Literal, Self

from pydantic import field_validator

from winnow_kernels.contract.fields import LayerCount, Ratio, Sparse, Tokens, beside_sinks

WHOLE_ABOVE: Final = 0.999
"""Above this share everything is attended to: what is left out would be less than what predictions are wrong by."""
TACTIC_TAIL_TOKENS: Final = 512
"""At most so many tokens at the end of a context are in no cluster yet; ``tactic`` reads them and sinks first."""
TACTIC_CAP_WARNING: Final = (
    f"decode.max_tokens is less than the sinks and the {TACTIC_TAIL_TOKENS} newest tokens that tactic may have to read"
    " before anything else: steps that have so many read nothing in between."
)


class Tactic(Sparse):
    """Attend to the clusters of tokens that together hold the share ``p`` of each query head's attention.

    Sinks, like the newest tokens, are in no cluster: their share of the attention is known exactly.

    Attributes:
        p: share of the attention mass.
        max_tokens: most tokens for each KV head, after the union over its query heads; None for no cap.
        full_layers: first layers, which are dense.
    """

    policy: Literal["tactic"] = "tactic"
    p: Ratio = 0.9
    max_tokens: Tokens | None = None
    full_layers: LayerCount = 2

    _holds_sinks = field_validator("max_tokens")(beside_sinks)

    def at_places(self, layers: Sequence[int]) -> Self:
        return self.model_copy(update={"full_layers": bisect_left(layers, self.full_layers)})

    def warnings(self) -> list[str]:
        if self.max_tokens is None or self.max_tokens >= self.sinks + TACTIC_TAIL_TOKENS:
            return []
        return [TACTIC_CAP_WARNING]
