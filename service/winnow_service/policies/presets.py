"""The policies that are there from the start, whatever the model. They can be neither replaced nor deleted.

The numbers are from the frontier of docs/measurements.md: no other policy there loses less without reading more. None
needs a profile of the model, and none ends attention to a full cache early. Those that promise a share read at least
``MIN_TOKENS``: a share alone is no promise of retrieval (docs/measurements.md, "Presets on RULER's tasks").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.contract.verification import AUTO, Verification
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.lowbit_top_k.parameters import LowBitTopK
from winnow_kernels.policies.lowbit_top_p.parameters import LowBitTopP
from winnow_kernels.policies.quality import NAME as AUTO_QUALITY
from winnow_kernels.policies.quality import Quality
from winnow_kernels.policies.quoka.parameters import QuokaPrefill
from winnow_kernels.policies.verified_pages.parameters import VerifiedPages

MIN_TOKENS: Final = 128
"""For each query head. One that has nine tenths of its attention on the first token still reads what it looks for."""


@dataclass(frozen=True)
class Preset:
    """A policy and, in a sentence, what it is for."""

    attention: AttentionPolicy
    description: str


PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        "exact": Preset(AttentionPolicy(), "Dense attention: what SGLang itself computes."),
        "balanced": Preset(
            AttentionPolicy(decode=LowBitTopP(min_tokens=MIN_TOKENS)),
            "Reads the fewest tokens that hold nine tenths of the attention, found by low-bit keys, and at least 128.",
        ),
        "fast": Preset(
            AttentionPolicy(decode=LowBitTopK(budget=512)),
            "The 512 tokens that hold most of the attention at every decode step, found by low-bit keys.",
        ),
        "lossless": Preset(
            AttentionPolicy(decode=VerifiedPages(budget=2048), verify=Verification(draft_tokens=AUTO)),
            "Dense attention's answer: as many drafts as pay, from what checks attended to. For servers that verify.",
        ),
        "long-prompt": Preset(
            AttentionPolicy(decode=LowBitTopP(min_tokens=MIN_TOKENS), prefill=QuokaPrefill(budget_ratio=0.25)),
            "Sparse prefill too: less time to the first token. Of several values to be looked up it may miss some.",
        ),
        "reasoning": Preset(
            AttentionPolicy(decode=LowBitTopP(min_tokens=MIN_TOKENS), early_termination=EarlyTermination()),
            "For long answers: stops reading once the output of a step has settled.",
        ),
    }
)

BUILT_IN: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        **PRESETS,
        AUTO_QUALITY: Preset(
            AttentionPolicy(quality=Quality()),
            "The cheapest policy that keeps the quality the server was set to, by its profile, at the prompt's length.",
        ),
    }
)
"""All names that are there from the start: the presets, and that of what the runtime chooses."""
