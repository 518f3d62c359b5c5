"""The parameters of DELTA."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from winnow_kernels.contract.fields import Layer, LayerCount, ModelFacts, PolicyError, Sparse, Tokens, refuse

MAX_DELTA_LAYERS: Final = 64


class Role(IntEnum):
    """What a layer is to a request; on a GPU 0 is what it is to those of other kinds."""

    FULL = 1  # it attends to everything
    REFRESH = 2  # it attends to everything and selects: a Δ-layer
    REUSE = 3  # it attends to what the last Δ-layer selected


def _tuple_of_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class Delta(Sparse):
    """Attend in full at the Δ-layers, and in the layers after each to the pages it found salient.

    Attributes:
        recency: newest tokens that are always kept.
        full_layers: first layers, which are dense.
        delta_layers: numbers of the Δ-layers, ascending; None takes the served model's calibrated profile.
    """

    policy: Literal["delta"] = "delta"
    budget: Tokens = 1024
    recency: Tokens = 128
    full_layers: LayerCount = 2
    delta_layers: (
        Annotated[tuple[Layer, ...], Field(min_length=1, max_length=MAX_DELTA_LAYERS), BeforeValidator(_tuple_of_list)]
        | None
    ) = None

    @field_validator("recency")
    @classmethod
    def _within_budget(cls, recency: int, info: ValidationInfo) -> int:
        budget, sinks = info.data.get("budget"), info.data.get("sinks", 0)
        if budget is not None and recency + sinks > budget:
            most = budget - sinks
            refuse(f"must be at most {most}: the budget ({budget}) also holds {sinks} sinks; it is {recency}")
        return recency

    @field_validator("delta_layers")
    @classmethod
    def _ascend(cls, layers: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
        if layers is None:
            return None
        if any(after <= before for before, after in pairwise(layers)):
            refuse("must be strictly increasing")
        full_layers = info.data.get("full_layers", 0)
        if layers[0] < full_layers:
            refuse(f"must be at least full_layers ({full_layers}); the first is {layers[0]}")
        return layers

    @property
    def reserved(self) -> int:
        return self.recency

    @property
    def named_layers(self) -> tuple[int, ...]:
        """The Δ-layers of a request; ``for_model`` has named them."""
        assert self.delta_layers is not None
        return self.delta_layers

    def role(self, layer: int) -> Role:
        """Return what ``layer`` is."""
        if layer in self.named_layers:
            return Role.REFRESH
        return Role.FULL if layer < self.named_layers[0] else Role.REUSE

    def at_places(self, layers: Sequence[int]) -> Self:
        """Return the parameters by places; the Δ-layers must be among ``layers``."""
        places = tuple(layers.index(layer) for layer in self.named_layers)
        return self.model_copy(update={"full_layers": bisect_left(layers, self.full_layers), "delta_layers": places})

    def for_model(self, model: ModelFacts) -> Self:
        """Return the parameters with their Δ-layers named."""
        if self.delta_layers is not None:
            if self.delta_layers[-1] >= model.layers:
                most = model.layers - 1
                raise PolicyError(
                    "delta_layers", f"must be at most {most}: the model has {model.layers} layers, counted from 0"
                )
            return self
        if not model.delta_layers:
            raise PolicyError(
                "delta_layers",
                "must be given: this model has no calibrated profile; name the layers, or run `winnow calibrate delta`",
            )
        first = model.delta_layers[0]
        if first < self.full_layers:
            raise PolicyError(
                "full_layers",
                f"must be at most {first}, the first layer of the model's profile, when delta_layers is not given",
            )
        return self.model_copy(update={"delta_layers": tuple(model.delta_layers)})
