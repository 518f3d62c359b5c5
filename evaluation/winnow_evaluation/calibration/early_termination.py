"""What early termination loses beside each policy, and reads: on the queries, keys and values of dense attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from sglang_winnow.profile_parts import StoppedPoint, StoppedPolicy, Stopping, kept_thresholds
from winnow_evaluation.calibration.parts import Advance, Found, Part
from winnow_kernels.attend.early_termination import TILE
from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.policies.attention_policy import AttentionPolicy

MAX_TOKENS: Final = 8
"""Behind each prompt."""
THRESHOLDS: Final = tuple(
    EarlyTermination(scale=scale, direction=direction)
    for scale, direction in ((0.01, 0.003), (0.03, 0.01), (0.1, 0.03), (0.3, 0.1))
)
_TO_THE_END: Final = "to the end"


@dataclass(frozen=True)
class StoppingPart(Part):
    """Every way to decode that can stop early, with every set of thresholds.

    Attributes:
        max_error: that thresholds are to keep.
    """

    name: ClassVar[str] = "early-termination"
    max_prompts: ClassVar[int] = 2
    max_error: float

    @property
    def tokens(self) -> int:
        return min(self.subject.tokens, MAX_TOKENS)

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"thresholds": [_name(each) for each in THRESHOLDS], "tokens": self.tokens}

    def measure(self, length: int, number: int, advance: Advance) -> dict[str, dict[str, dict[str, float]]]:
        """Return the output's error, and the KV read, of each policy with each set of thresholds and without."""
        subject = self.subject
        policies = self._stopping(length)
        found: dict[str, dict[str, dict[str, float]]] = {}
        with torch.inference_mode():
            batch = subject.prefilled(length, number, self.tokens, policies)
            forcing = subject.forcing(batch, length, number, self.tokens)
            queries = forcing.queries()
            advance("dense")
            for policy in policies:
                whole = forcing.replay(policy, queries)
                own = {_TO_THE_END: {"kv_read_ratio": whole.kv_read_ratio}}
                for thresholds in THRESHOLDS:
                    stopped = forcing.replay(policy.model_copy(update={"early_termination": thresholds}), queries)
                    own[_name(thresholds)] = {
                        "kv_read_ratio": stopped.kv_read_ratio,
                        "error": relative_distance(stopped.outputs, whole.outputs),
                    }
                found[policy.canonical()] = own
                advance(policy.decode.policy)
        return found

    def result(self, found: Found) -> Stopping:
        """Return what a profile has of it."""
        policies = [
            StoppedPolicy(attention=policy, early_termination=thresholds, points=points)
            for policy in self._stopping(self.subject.lengths[-1])
            for thresholds in THRESHOLDS
            if (points := tuple(self._points(found, policy, _name(thresholds))))
        ]
        return Stopping(
            max_error=self.max_error,
            prompts=self.prompts,
            tokens=self.tokens,
            policies=tuple(policies),
            kept=kept_thresholds(policies, self.max_error),
        )

    def _stopping(self, length: int) -> list[AttentionPolicy]:
        """Return the policies that read more than the tiles that must be calm before reading stops."""
        patience = min(thresholds.patience for thresholds in THRESHOLDS)
        decodes = [policy for policy in self.subject.decodes(length) if policy.early_termination is None]
        return [
            policy for policy in decodes if getattr(policy.decode, "budget", None) is None or _tiles(policy) > patience
        ]

    def _points(self, found: Found, policy: AttentionPolicy, name: str) -> Iterator[StoppedPoint]:
        for length in self.subject.lengths:
            of_prompts = [found[length, number].get(policy.canonical()) for number in range(self.prompts)]
            if None in of_prompts:
                continue
            errors = [figures[name]["error"] for figures in of_prompts]
            yield StoppedPoint(
                length=length,
                error=fmean(errors),
                worst=max(errors),
                kv_read_ratio=fmean(figures[name]["kv_read_ratio"] for figures in of_prompts),
                kv_read_ratio_to_the_end=fmean(figures[_TO_THE_END]["kv_read_ratio"] for figures in of_prompts),
            )


def relative_distance(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return how far outputs are from others, relative to these: a mean over layers, prompts, tokens and query heads.

    Args:
        found: of each layer, [prompts, tokens, query heads, head dim].
        exact: what they should be.
    """
    distances = [
        torch.linalg.vector_norm(own.float() - other.float(), dim=-1) / torch.linalg.vector_norm(other.float(), dim=-1)
        for own, other in zip(found, exact, strict=True)
    ]
    return float(torch.stack(distances).double().mean())


def _tiles(policy: AttentionPolicy) -> int:
    budget: int = policy.decode.model_dump()["budget"]
    return budget // TILE


def _name(thresholds: EarlyTermination) -> str:
    return thresholds.model_dump_json()
