"""How long attention takes in a request's decode steps, beside dense attention: by the steps of a server on the device.

On a GPU dense attention is Winnow's own kernel, which attends to everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar, Final

import torch

from sglang_winnow.profile_parts import DenseTime, Speed, TimedPoint, TimedPolicy
from winnow_evaluation.calibration.parts import Advance, Found, Part
from winnow_evaluation.fidelity.forcing import DENSE, Forcing
from winnow_evaluation.fidelity.prefilled import PrefilledBatch
from winnow_kernels.policies.attention_policy import AttentionPolicy

STEPS: Final = 16
_DENSE: Final = DENSE.canonical()


@dataclass(frozen=True)
class SpeedPart(Part):
    """Every way to decode at every length, on one prompt: policies take turns at each of its steps."""

    name: ClassVar[str] = "speed"
    max_prompts: ClassVar[int] = 1

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"steps": STEPS, "threads": self._threads}

    def measure(self, length: int, number: int, advance: Advance) -> dict[str, list[float]]:
        """Return the seconds of each step."""
        subject = self.subject
        policies = [DENSE, *subject.decodes(length)]
        tokens = min(subject.tokens, STEPS)
        with torch.inference_mode():
            batch = subject.prefilled(length, number, tokens, policies)
            forcing = subject.forcing(batch, length, number, tokens)
            advance("dense")
            seconds = self._timed(forcing, batch, policies)
        advance("times")
        return {policy.canonical(): own for policy, own in zip(policies, seconds, strict=True)}

    @property
    def _on_gpu(self) -> bool:
        return self.subject.model.device.type == "cuda"

    @property
    def _threads(self) -> int | None:
        return None if self._on_gpu else torch.get_num_threads()

    def _timed(self, forcing: Forcing, batch: PrefilledBatch, policies: Sequence[AttentionPolicy]) -> list[list[float]]:
        queries = forcing.queries()
        if not self._on_gpu:
            return forcing.time(policies, queries, STEPS)
        # Triton looks for a GPU's driver when it is imported.
        from winnow_evaluation.fidelity.device_steps import time_steps  # noqa: PLC0415

        return time_steps(batch, policies, [queries[layer] for layer in self.subject.model.full_layers], STEPS)

    def result(self, found: Found) -> Speed:
        """Return what a profile has of it."""
        lengths = self.subject.lengths
        by_length = {length: found[length, 0] for length in lengths}
        dense = [DenseTime(length=length, seconds=median(by_length[length][_DENSE])) for length in lengths]
        # The longest prompt has the most policies that leave something out.
        policies = self.subject.decodes(lengths[-1])
        return Speed(
            threads=self._threads,
            steps=STEPS,
            dense=tuple(dense),
            policies=tuple(
                TimedPolicy(attention=policy, points=tuple(_points(policy.canonical(), by_length)))
                for policy in policies
            ),
        )


def _points(name: str, by_length: Mapping[int, Mapping[str, Sequence[float]]]) -> list[TimedPoint]:
    return [
        TimedPoint(
            length=length,
            seconds=median(seconds[name]),
            ratio=median(own / dense for own, dense in zip(seconds[name], seconds[_DENSE], strict=True)),
        )
        for length, seconds in by_length.items()
        if name in seconds
    ]
