"""What may be asked of an explanation: of which decode steps, layers and KV heads, and how much of it.

An explanation tells which tokens a request's decode steps attended to, and beside them the weights of dense attention.
It has a number for each token of the context, for each step, layer and head: their product is bounded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Final

from pydantic import AfterValidator, Field, ValidationError

from winnow_kernels.contract.fields import MAX_LAYERS, Contract, PolicyError
from winnow_kernels.contract.layers import check_layers

PARAMETER: Final = "attention_explain"
"""Where it travels in ``sampling_params.custom_params``: as JSON text, beside the policy."""
MAX_DECODE_STEPS: Final = 256
MAX_HEADS: Final = 1024
MAX_WEIGHTS: Final = 262_144
"""Steps × layers × heads × tokens of one answer."""
_DEFAULT_LAYERS: Final = 4
_DEFAULT_HEADS: Final = 2


def _in_order(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))


Steps = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MAX_DECODE_STEPS)], ...],
    Field(min_length=1, max_length=MAX_DECODE_STEPS),
    AfterValidator(_in_order),
]
"""Decode steps by number. The first token comes from the prefill: step 1 computes the second."""
Layers = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=MAX_LAYERS)], ...],
    Field(min_length=1, max_length=MAX_LAYERS),
    AfterValidator(_in_order),
]
Heads = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=MAX_HEADS)], ...],
    Field(min_length=1, max_length=MAX_HEADS),
    AfterValidator(_in_order),
]


class Explain(Contract):
    """What is explained of a request: every combination of these, by number and in order."""

    steps: Steps
    layers: Layers
    heads: Heads

    def weights(self, tokens: int) -> int:
        """Return how many weights that is, of contexts of at most ``tokens``."""
        return len(self.steps) * len(self.layers) * len(self.heads) * tokens

    def check_size(self, prompt_tokens: int) -> None:
        """Refuse what would be too long an answer.

        Raises:
            PolicyError: it would be; the path is ``attention_explain.steps``.
        """
        tokens = prompt_tokens + self.steps[-1]
        if (weights := self.weights(tokens)) > MAX_WEIGHTS:
            raise PolicyError(
                f"{PARAMETER}.steps",
                f"steps, layers, heads and tokens must multiply to at most {MAX_WEIGHTS}; {len(self.steps)} steps,"
                f" {len(self.layers)} layers, {len(self.heads)} heads and {tokens} tokens are {weights}",
            )

    def check_model(
        self, layers: int, sliding_layers: Collection[int], kv_heads: int, linear_layers: Collection[int] = ()
    ) -> None:
        """Refuse layers and heads that the model does not have, or where policies do not act.

        Raises:
            PolicyError: the path is ``attention_explain`` and the field's name.
        """
        if self.layers[-1] >= layers:
            raise PolicyError(
                f"{PARAMETER}.layers", f"must be at most {layers - 1}; there is no layer {self.layers[-1]}"
            )
        check_layers(f"{PARAMETER}.layers", self.layers, sliding_layers, linear_layers)
        if self.heads[-1] >= kv_heads:
            raise PolicyError(
                f"{PARAMETER}.heads", f"must be at most {kv_heads - 1}, KV heads; there is no head {self.heads[-1]}"
            )


def parse_explain(text: object) -> Explain:
    """Read what a request asks for from JSON text.

    Raises:
        PolicyError: it is not what it must be.
    """
    if not isinstance(text, str):
        raise PolicyError(PARAMETER, "must be a string of JSON")
    try:
        return Explain.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        path = ".".join([PARAMETER, *(str(part)[:40] for part in first["loc"])]).encode("unicode_escape").decode()
        raise PolicyError(path, first["msg"].replace("Input should be", "must be", 1)) from None


def default_steps(decode_steps: int) -> tuple[int, ...]:
    """Return the steps that are explained where none are named: the first and the last."""
    return _in_order((1, decode_steps))


def default_layers(layers: int, left_out: Collection[int]) -> tuple[int, ...]:
    """Return the layers that are explained where none are named: four, spread over those where policies act."""
    full = [layer for layer in range(layers) if layer not in left_out]
    return _spread(full, _DEFAULT_LAYERS)


def default_heads(kv_heads: int) -> tuple[int, ...]:
    """Return the KV heads that are explained where none are named: two, the first and the last."""
    return _spread(range(kv_heads), _DEFAULT_HEADS)


def _spread(numbers: Sequence[int], count: int) -> tuple[int, ...]:
    last = len(numbers) - 1
    return _in_order(tuple(numbers[round(index * last / (count - 1))] for index in range(count)))
