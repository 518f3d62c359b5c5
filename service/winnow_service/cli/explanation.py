"""An explanation as it is drawn: what each policy attended to, summed up over layers and heads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

DECADES: Final = 4
"""Heat falls from 1, at the largest weight, to 0 at so many powers of ten below it."""


@dataclass(frozen=True)
class Token:
    """A token of the context in one step, over all explained layers and heads.

    Attributes:
        position: in the context.
        text: of the prompt or the output; empty if it is not known.
        weight: of dense attention, the mean.
        attended: by what share of the heads.
    """

    position: int
    text: str
    weight: float
    attended: float


def heat(weight: float, largest: float) -> float:
    """Return how hot a weight is drawn, from 0 to 1: by its logarithm."""
    return 0.0 if weight <= 0 or largest <= 0 else max(0.0, 1 + math.log10(weight / largest) / DECADES)


def title(policy: dict[str, Any]) -> str:
    """Return what a policy is called: its name, or what it is."""
    name: str | None = policy["policy"]
    return name or json.dumps(policy["attention"]["decode"], separators=(", ", ": "))


def steps_found(policy: dict[str, Any]) -> list[int]:
    """Return the steps of a policy that were explained."""
    return sorted({entry["step"] for entry in policy["entries"]})


def tokens_of(prompt: dict[str, Any], policy: dict[str, Any], step: int) -> list[Token]:
    """Return the tokens of the context in a step."""
    entries = [entry for entry in policy["entries"] if entry["step"] == step]
    length = len(entries[0]["weights"])
    texts = [*_texts(prompt), *_texts(policy["output"])]
    weights, attended = [0.0] * length, [0] * length
    for entry in entries:
        for position, weight in enumerate(entry["weights"]):
            weights[position] += weight
        for begin, end in entry["attended"]:
            for position in range(begin, end):
                attended[position] += 1
    return [
        Token(
            position,
            texts[position] if position < len(texts) else "",
            weights[position] / len(entries),
            attended[position] / len(entries),
        )
        for position in range(length)
    ]


@dataclass(frozen=True)
class LayerShare:
    """What the heads of a layer held and read in one step, means over them.

    Attributes:
        share: of the dense weights.
        attended: of the tokens.
        dense: whether the step read everything.
    """

    share: float
    attended: float
    dense: bool


def share_of(policy: dict[str, Any], layer: int | None, step: int) -> LayerShare | None:
    """Return what a layer, or all of them, held in a step; None if the step was not explained."""
    entries = [
        entry for entry in policy["entries"] if entry["step"] == step and (layer is None or entry["layer"] == layer)
    ]
    if not entries:
        return None
    attended = _mean([entry["attended_tokens"] / len(entry["weights"]) for entry in entries])
    return LayerShare(_mean([entry["share"] for entry in entries]), attended, all(entry["dense"] for entry in entries))


def _texts(tokenized: dict[str, Any]) -> Iterator[str]:
    """Return the text of each token; one that shares a character with tokens before it has none of its own."""
    text, drawn = tokenized["text"] or "", 0
    for begin, end in tokenized["offsets"] or ():
        yield text[max(begin, drawn) : end]
        drawn = max(drawn, end)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
