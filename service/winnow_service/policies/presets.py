"""The policies that are there from the start, whatever the model. They can be neither replaced nor deleted.

The numbers are those of docs/measurements.md that answered like dense attention. None needs a profile of the model, and
none ends attention to a full cache early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.quest.parameters import Quest
from winnow_kernels.policies.quoka.parameters import QuokaPrefill
from winnow_kernels.policies.tactic.parameters import Tactic


@dataclass(frozen=True)
class Preset:
    """A policy and, in a sentence, what it is for."""

    attention: AttentionPolicy
    description: str


PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        "exact": Preset(AttentionPolicy(), "Dense attention: what SGLang itself computes."),
        "balanced": Preset(
            AttentionPolicy(decode=Tactic()),
            "Reads what holds nine tenths of the attention. One of many look-alike identifiers it may miss.",
        ),
        "fast": Preset(
            AttentionPolicy(decode=Quest(budget=1024)),
            "A fixed budget at every decode step. For a few thousand tokens: the longer a prompt, the more it misses.",
        ),
        "long-prompt": Preset(
            AttentionPolicy(decode=Tactic(), prefill=QuokaPrefill()),
            "Sparse prefill too: less time to the first token. The longer a prompt, the more it misses.",
        ),
        "reasoning": Preset(
            AttentionPolicy(decode=Tactic(), early_termination=EarlyTermination()),
            "For long answers: stops reading once the output of a step has settled.",
        ),
    }
)
