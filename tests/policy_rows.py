"""What tests know of each decode policy: a row for each in the registry, from which they take their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from winnow_kernels.policies.registry import DECODE_POLICIES, PARAMETERS
from winnow_kernels.policies.snapkv.parameters import Voted

Json = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A decode policy.

    Attributes:
        defaults: what a request gets that names the policy alone.
        small: parameters with which it reads less than a prompt of 140 tokens, in a model of three layers.
    """

    defaults: Json
    small: Json


ROWS: Final[dict[str, Row]] = {
    "dense": Row({}, {}),
    "streaming_llm": Row({"sinks": 4, "window": 1024}, {"window": 64}),
    "quest": Row({"sinks": 16, "budget": 2048, "full_layers": 2}, {"budget": 64, "full_layers": 1}),
    "snapkv": Row(
        {"sinks": 16, "budget": 1024, "observation_window": 32, "kernel_size": 5},
        {"budget": 48, "observation_window": 16},
    ),
    "pyramidkv": Row(
        {"sinks": 16, "budget": 1024, "observation_window": 32, "kernel_size": 5},
        {"budget": 64, "observation_window": 32},
    ),
    "ada_snapkv": Row(
        {"sinks": 16, "budget": 1024, "observation_window": 32, "kernel_size": 5, "floor": 0.2},
        {"budget": 48, "observation_window": 16},
    ),
    "delta": Row(
        {"sinks": 16, "budget": 1024, "recency": 128, "full_layers": 2},
        {"budget": 64, "recency": 32, "delta_layers": [1], "full_layers": 1},
    ),
    "tactic": Row({"sinks": 16, "p": 0.9, "full_layers": 2}, {"p": 0.5, "full_layers": 1}),
    "quoka": Row({"sinks": 16, "budget": 1024}, {"budget": 48}),
    "sparq": Row({"sinks": 16, "budget": 1024, "channels": 32}, {"budget": 48, "channels": 8}),
    "lowbit_top_p": Row({"sinks": 16, "p": 0.9, "min_tokens": 0}, {"p": 0.3, "max_tokens": 100}),
    "lowbit_top_k": Row({"sinks": 16, "budget": 1024}, {"budget": 100}),
    "verified_pages": Row({"sinks": 16, "budget": 1024, "recency": 64}, {"budget": 64, "recency": 16}),
}
assert tuple(ROWS) == DECODE_POLICIES, "each policy of the registry has a row here, in its order"

VOTED: Final = tuple(name for name, parameters in PARAMETERS["decode"].items() if issubclass(parameters, Voted))
"""Policies in which an observation window votes."""
DRAFTS_ONLY: Final = tuple(name for name, parameters in PARAMETERS["decode"].items() if parameters.drafts_only)
"""Policies of verified requests alone."""


def small_policies() -> dict[str, Json]:
    """What a request says that asks for each policy with its small parameters; of those that need no verification."""
    return {
        name: {"decode": {"policy": name, **row.small}} if row.small else {}
        for name, row in ROWS.items()
        if name not in DRAFTS_ONLY
    }
