"""The parameters of Quest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import field_validator

from winnow_kernels.contract.fields import LayerCount, Sparse, Tokens, beside_sinks


class Quest(Sparse):
    """Attend to the pages whose key bounds promise the highest scores; the first ``full_layers`` layers are dense."""

    policy: Literal["quest"] = "quest"
    budget: Tokens = 2048
    full_layers: LayerCount = 2

    _holds_sinks = field_validator("budget")(beside_sinks)

    def at_places(self, layers: Sequence[int]) -> Self:
        return self.model_copy(update={"full_layers": bisect_left(layers, self.full_layers)})
